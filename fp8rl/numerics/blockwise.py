"""Block-wise FP8: the one quantiser that rollout, learner and requantisation call.

Weights are scaled in 128x128 blocks, activations and output gradients in groups of 128 along the
contraction axis, all with FP32 scales. For a block whose largest magnitude is `amax`:

    scale     = 448 / amax            1 for a block of zeros; where the quotient overflows, the
                                      largest finite value of the input's own dtype
    values    = round_to_e4m3(clamp(x * scale, -448, 448))
    scale_inv = 1 / scale             the descale: this is what is stored and sent

The rule, its order of operations and its edge cases are those of Transformer Engine's block scaling
kernels (design: "The numbers"). In power-of-two mode `scale` is rounded down to a power of two.
Edges that are not multiples of 128 are zero-padded for the arithmetic and cropped again.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rl.numerics import compiled
from fp8rl.numerics.e4m3 import decode_e4m3, encode_e4m3, round_to_e4m3
from fp8rl.numerics.formats import BLOCK, E4M3_MAX
from fp8rl.numerics.padding import pad_dim, split_groups


class NonFiniteError(ValueError):
    """A tensor to be quantised holds NaN or Inf."""


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [N, K] in 128x128 blocks.

    codes: uint8 [N, K], E4M3 bytes. scale_inv: FP32 [ceil(N/128), ceil(K/128)], descales.
    """

    codes: Tensor
    scale_inv: Tensor

    def dequantise(self) -> Tensor:
        """FP32 [N, K]: value times descale, one FP32 multiplication per element."""
        return dequantise_weight(self.codes, self.scale_inv)


def _scale_and_inverse(amax: Tensor, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    # Divisions of tensors: `number / tensor` is a reciprocal and a product in torch, rounded twice.
    one = torch.ones_like(amax)
    scale = torch.where(amax == 0, one, torch.full_like(amax, E4M3_MAX) / amax)
    scale = torch.where(torch.isinf(scale), torch.finfo(dtype).max, scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale, one / scale


def _require_finite(amax: Tensor, x: Tensor, name: str) -> None:
    # amax carries NaN and Inf on, so the usual check reads one value per block, not every element.
    if bool(torch.isfinite(amax).all()):
        return
    bad = ~torch.isfinite(x)
    first = tuple(bad.nonzero()[0].tolist())
    raise NonFiniteError(
        f"{name}: {int(bad.sum())} of {x.numel()} values are NaN or Inf (first at {first}); "
        "they cannot be quantised to FP8"
    )


def _on_grid(x: Tensor, scale: Tensor) -> Tensor:
    return round_to_e4m3((x * scale).clamp_(-E4M3_MAX, E4M3_MAX))


def quantise_weight(
    weight: Tensor, *, power_of_two: bool = False, name: str = "weight"
) -> QuantisedWeight:
    """Quantises `weight` [N, K] (FP32, BF16 or FP16) in 128x128 blocks.

    Raises NonFiniteError, naming the tensor, where it holds NaN or Inf.
    """
    blocks = _weight_blocks(weight.detach().float())
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    _require_finite(amax, weight, name)
    scale, scale_inv = _scale_and_inverse(amax, weight.dtype, power_of_two)
    codes = encode_e4m3(_on_grid(blocks, scale)).flatten(2).flatten(0, 1)
    n, k = weight.shape
    return QuantisedWeight(codes[:n, :k].contiguous(), scale_inv[:, 0, :, 0].contiguous())


def dequantise_weight(codes: Tensor, scale_inv: Tensor) -> Tensor:
    """FP32 [N, K] from E4M3 `codes` [N, K] and descales [ceil(N/128), ceil(K/128)]."""
    n, k = codes.shape
    rows = scale_inv.repeat_interleave(BLOCK, 0)[:n]
    return decode_e4m3(codes) * rows.repeat_interleave(BLOCK, 1)[:, :k]


def _weight_blocks(weight: Tensor) -> Tensor:
    """[N, K] -> [ceil(N/128), 128, ceil(K/128), 128], zero-padded."""
    padded = pad_dim(pad_dim(weight, 0, BLOCK), 1, BLOCK)
    return padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))


def quantise_groups(
    x: Tensor, *, power_of_two: bool = False, name: str = "activation"
) -> tuple[Tensor, Tensor]:
    """Quantises `x` [..., K] in groups of 128 along its last axis.

    Returns (values, scale_inv): FP32 E4M3 values [..., ceil(K/128), 128] (padding included) and
    FP32 descales [..., ceil(K/128), 1]. Raises NonFiniteError as `quantise_weight`.
    """
    # A transposed view is laid out first: the passes below would each stride through it.
    groups = split_groups(x.detach().contiguous().float(), BLOCK)
    amax = groups.abs().amax(dim=-1, keepdim=True)
    _require_finite(amax, x, name)
    scale, scale_inv = _scale_and_inverse(amax, x.dtype, power_of_two)
    return _on_grid(groups, scale), scale_inv


def round_trip_groups(x: Tensor, *, power_of_two: bool = False, name: str = "activation") -> Tensor:
    """`x` [..., K] quantised in groups of 128 along K and dequantised again: FP32 [..., K].

    On a CPU one compiled pass computes the same bits as the definition in `quantise_groups`.
    """
    if compiled.supports(x):
        rows = x.detach().reshape(-1, x.shape[-1]).contiguous()
        done = compiled.round_trip(rows, along_rows=True, power_of_two=power_of_two)
        if done is not None:
            return done.view(x.shape)
    values, scale_inv = quantise_groups(x, power_of_two=power_of_two, name=name)
    return values.mul_(scale_inv).flatten(-2)[..., : x.shape[-1]]


def round_trip_tokens(x: Tensor, *, power_of_two: bool = False, name: str = "activation") -> Tensor:
    """`x` [T, K] quantised in groups of 128 along T, each column by itself, and dequantised: FP32.

    The bits of `round_trip_groups` on the transpose; a compiled pass spares the transposing.
    """
    if compiled.supports(x):
        done = compiled.round_trip(x.detach().contiguous(), along_rows=False, power_of_two=power_of_two)
        if done is not None:
            return done
    return round_trip_groups(x.t(), power_of_two=power_of_two, name=name).t()
