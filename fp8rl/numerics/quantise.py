"""The one FP8 quantiser: rollout, learner and requantisation call it, in every scaling mode.

For a tile whose largest magnitude is `amax`, and an element format with largest value `max`:

    scale     = max / amax            1 for a tile of zeros; where the quotient overflows, the largest
                                      finite value of the input's dtype (block) or of FP32 (the rest)
    values    = round(clamp(x * scale, -max, max))
    scale_inv = 1 / scale             the descale: this is what is stored and sent

Power-of-two scales are `scale` rounded down. UE8M0 (MXFP8) goes the other way round: the descale is
amax * (1 / max) rounded up to a power of two. Rule, order of operations and edge cases are those of
Transformer Engine's kernels (compute_scale_from_amax, float_to_e8m0). Edges that do not fill a tile
are zero-padded for the arithmetic and cropped again. NaN and Inf are refused.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rl.numerics.elements import DTYPES, decode, encode, round_to
from fp8rl.numerics.formats import ScaleRule, Scheme
from fp8rl.numerics.padding import pad_dim

_MANTISSA = 0x7FFFFF
_EXPONENT = 0x7F800000


class NonFiniteError(ValueError):
    """A tensor to be quantised holds NaN or Inf."""

    def of(self, layer: str) -> "NonFiniteError":
        """The same error with the layer in which it happened."""
        return NonFiniteError(f"{layer}: {self}")


@dataclass(frozen=True)
class Quantised:
    """A tensor [R, C] in FP8.

    codes: uint8 [R, C]. scale_inv: FP32 [tiles down, tiles across], descales. scheme: how.
    """

    codes: Tensor
    scale_inv: Tensor
    scheme: Scheme

    def values(self) -> Tensor:
        """FP32 [R, C]: the codes' values, without their scales."""
        return decode(self.codes, self.scheme.element)

    def dequantise(self) -> Tensor:
        """FP32 [R, C]: value times descale, one FP32 multiplication per element."""
        return self.values().mul_(spread(self.scale_inv, self.scheme, tuple(self.codes.shape)))

    def float8(self) -> Tensor:
        """The codes as PyTorch's float8 dtype, without a copy."""
        return self.codes.view(DTYPES[self.scheme.element])


def spread(scale_inv: Tensor, scheme: Scheme, shape: tuple[int, ...]) -> Tensor:
    """`scale_inv` repeated over the elements of each tile, so that it broadcasts to `shape`."""
    high, wide = scheme.tile
    for dim, size in ((0, high), (1, wide)):
        if size is not None and size > 1 and scale_inv.shape[dim] > 1:
            scale_inv = scale_inv.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return scale_inv


def quantise(x: Tensor, scheme: Scheme, *, name: str = "tensor") -> Quantised:
    """Quantises `x` [R, C] (FP32, BF16 or FP16), in any layout.

    Raises NonFiniteError with the tensor's name, the count and the first place of NaN or Inf.
    """
    x = x.detach()
    if x.device.type == "cpu":
        codes = torch.empty(x.shape, dtype=torch.uint8)
        return Quantised(codes, _compiled(x, scheme, codes, name), scheme)
    values, scale_inv = define(x, scheme, name=name)
    return Quantised(encode(values, scheme.element), scale_inv, scheme)


def quantise_values(x: Tensor, scheme: Scheme, *, name: str = "tensor") -> tuple[Tensor, Tensor]:
    """As `quantise`, with the values in BF16 (which holds every FP8 value) in place of codes."""
    x = x.detach()
    if x.device.type == "cpu":
        bits = torch.empty(x.shape, dtype=torch.uint16)
        scale_inv = _compiled(x, scheme, bits, name)
        return bits.view(torch.bfloat16), scale_inv
    values, scale_inv = define(x, scheme, name=name)
    return values.bfloat16(), scale_inv


def round_trip(x: Tensor, scheme: Scheme, *, name: str = "tensor") -> Tensor:
    """`x` [R, C] quantised and dequantised again: FP32 [R, C]."""
    x = x.detach()
    if x.device.type == "cpu":
        out = torch.empty(x.shape, dtype=torch.float32)
        _compiled(x, scheme, out, name)
        return out
    values, scale_inv = define(x, scheme, name=name)
    return values.mul_(spread(scale_inv, scheme, tuple(x.shape)))


def define(x: Tensor, scheme: Scheme, *, name: str = "tensor") -> tuple[Tensor, Tensor]:
    """The definition, in plain PyTorch on any device: (FP32 values [R, C], scale_inv)."""
    rows, columns = x.shape
    high, wide = scheme.tile[0] or max(rows, 1), scheme.tile[1] or max(columns, 1)
    padded = pad_dim(pad_dim(x.float(), 0, high), 1, wide)
    tiles = padded.unflatten(0, (-1, high)).unflatten(2, (-1, wide))
    amax = tiles.abs().amax(dim=(1, 3), keepdim=True)
    # amax carries NaN and Inf on, so the usual check reads one value per tile, not every element.
    if not bool(torch.isfinite(amax).all()):
        raise _non_finite(x, name)
    scale, scale_inv = scale_and_inverse(amax, scheme, x.dtype)
    limit = scheme.element.max
    values = round_to((tiles * scale).clamp_(-limit, limit), scheme.element)
    return (
        values.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(),
        scale_inv[:, 0, :, 0].contiguous(),
    )


def scale_and_inverse(amax: Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(scale, descale), FP32, of tiles with largest magnitudes `amax` (FP32) in a tensor of `dtype`."""
    one = torch.ones_like(amax)
    limit = torch.full_like(amax, scheme.element.max)
    if scheme.rule is ScaleRule.UE8M0:
        bits = (amax * (one / limit)).view(torch.int32)
        exponent, mantissa = bits >> 23, bits & _MANTISSA
        # A value below half of the smallest normal number keeps exponent 0: its tile becomes zeros.
        up = (mantissa > 0) & ~((exponent == 0) & (mantissa <= 0x400000))
        exponent = exponent + up.int()
        scale = torch.where(exponent == 0, one, ((254 - exponent) << 23).view(torch.float32))
        # 2^-127 is subnormal: as bits, since a process may flush such numbers to zero.
        descale = torch.where(exponent == 0, 0x400000, exponent << 23).view(torch.float32)
        return scale, descale
    # Divisions of tensors: `number / tensor` is a reciprocal and a product in torch, rounded twice.
    scale = torch.where(amax == 0, one, limit / amax)
    largest = torch.finfo(dtype if scheme.small_block_dtype else torch.float32).max
    scale = torch.where(torch.isinf(scale), largest, scale)
    if scheme.rule is ScaleRule.POW2:
        scale = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
    return scale, one / scale


def _non_finite(x: Tensor, name: str) -> NonFiniteError:
    bad = ~torch.isfinite(x)
    first = tuple(bad.nonzero()[0].tolist())
    return NonFiniteError(
        f"{name}: {int(bad.sum())} of {x.numel()} values are NaN or Inf (first at {first}); "
        "they cannot be quantised to FP8"
    )


def _compiled(x: Tensor, scheme: Scheme, out: Tensor, name: str) -> Tensor:
    from fp8rl.numerics import compiled  # numba; a GPU machine may have PyTorch only

    scale_inv = compiled.quantise(x, scheme, out)
    if scale_inv is None:
        raise _non_finite(x, name)
    return scale_inv
