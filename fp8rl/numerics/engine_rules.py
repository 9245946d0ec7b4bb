"""How other engines scale an FP8 block, re-stated in plain PyTorch for `parity` to hold ours against.

Each rule says what its engine does with a block's largest magnitude `amax`: the factor that values
are multiplied with before the cast to E4M3, and the descale that is stored beside the codes.

    rule               amax floor  factor               descale       other        power of two
    te-kernel                      448 / amax           1 / factor    0: 1, inf a  factor rounded down
    te-reference                   448 / amax           1 / factor    0: 1, inf a  factor rounded down
    vllm-weights       1e-4        1 / descale          amax / 448    no clamp     descale rounded up
    vllm-weights-gpu   1e-4        1 / descale          amax * 1/448  no clamp     descale rounded up
    vllm-activations   1e-10       values / descale     amax / 448                 descale rounded up
    nemo-rl                        (1 / amax) * 448     1 / factor    0: 1, pad b  descale rounded up
    verl-triton        1e-10       1 / descale          amax / 448                 none
    verl-torch                     448 / amax           1 / factor    0: 1         none

    0: 1     the factor of a block of zeros is 1
    inf a    a factor that overflows becomes the largest finite value of the input's dtype
    pad b    edges are filled with the tensor's last element rather than with zeros

Rounding up goes through ceil(log2(...)) in FP32, as those engines write it; rounding down does not.
Where a rule names a quotient of two numbers it is IEEE's. torch turns two of them into products:
`number / tensor` (nemo-rl) is a reciprocal and a product, and a tensor divided by a constant becomes
a product when it is compiled for a GPU (vllm-weights-gpu). Triton's own division (verl-triton) may
be an ulp away from IEEE's. Inputs are finite: what an engine makes of Inf and NaN is left out, since
ours refuses them.

Nothing here calls our quantiser, and codes come from torch's own cast.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from fp8rl.numerics.padding import pad_dim

E4M3_MAX = 448.0


class Operand(StrEnum):
    """What a rule is applied to in its engine."""

    WEIGHTS = "weights"
    ACTIVATIONS = "activations"


@dataclass(frozen=True)
class Blocks:
    """A tensor [R, C] cut into blocks, padded with zeros: FP32 [blocks, elements], row by row."""

    values: Tensor
    shape: tuple[int, int]
    tile: tuple[int, int]

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks down and across."""
        return -(-self.shape[0] // self.tile[0]), -(-self.shape[1] // self.tile[1])

    def whole(self, blocks: Tensor) -> Tensor:
        """[blocks, elements] laid out as the tensor again, without the padding."""
        (down, across), (high, wide), (rows, columns) = self.grid, self.tile, self.shape
        laid = blocks.view(down, across, high, wide).transpose(1, 2)
        return laid.reshape(down * high, across * wide)[:rows, :columns]

    def spread(self, per_block: Tensor) -> Tensor:
        """One value a block, repeated over the tensor's elements."""
        (down, across), (high, wide), (rows, columns) = self.grid, self.tile, self.shape
        laid = per_block.view(down, 1, across, 1).expand(down, high, across, wide)
        return laid.reshape(down * high, across * wide)[:rows, :columns]

    def amax(self, *, pads_with_last: bool = False) -> Tensor:
        """Largest magnitude of each block; pads_with_last: as if the padding were the last element."""
        amax = self.values.abs().amax(1)
        if pads_with_last:
            last = self.whole(self.values)[-1, -1].abs()
            edges = amax.view(self.grid)
            if self.shape[0] % self.tile[0]:
                edges[-1].clamp_(min=last)
            if self.shape[1] % self.tile[1]:
                edges[:, -1].clamp_(min=last)
        return amax


def cut(x: Tensor, tile: tuple[int, int]) -> Blocks:
    """`x` [R, C] in blocks of `tile`."""
    padded = pad_dim(pad_dim(x.float(), 0, tile[0]), 1, tile[1])
    blocks = padded.unflatten(0, (-1, tile[0])).unflatten(2, (-1, tile[1])).transpose(1, 2)
    return Blocks(blocks.reshape(-1, tile[0] * tile[1]), (x.shape[0], x.shape[1]), tile)


@dataclass(frozen=True)
class Scales:
    """FP32, one of each a block. factor: what values are multiplied with. descale: what is stored."""

    factor: Tensor
    descale: Tensor


Scaler = Callable[[Tensor, torch.dtype, bool], Scales]
"""(amax, dtype of the input, power of two) -> Scales"""


@dataclass(frozen=True)
class EngineRule:
    """One engine's rule in one scale mode.

    divides: values are divided by the descale rather than multiplied with the factor. clamps: values
    are limited to 448 before the cast. pads_with_last: see the table above.
    """

    name: str
    engine: str
    operand: Operand
    pow2: bool
    scaler: Scaler
    divides: bool = False
    clamps: bool = True
    pads_with_last: bool = False

    def scales(self, amax: Tensor, dtype: torch.dtype) -> Scales:
        """Scales of blocks with largest magnitudes `amax` (FP32) in a tensor of `dtype`."""
        return self.scaler(amax, dtype, self.pow2)

    def codes(self, values: Tensor, scales: Scales) -> Tensor:
        """E4M3 byte codes (uint8) of FP32 `values` [blocks, elements]."""
        if self.divides:
            scaled = values / scales.descale[:, None]
        else:
            scaled = values * scales.factor[:, None]
        if self.clamps:
            scaled = scaled.clamp_(-E4M3_MAX, E4M3_MAX)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def decode(codes: Tensor) -> Tensor:
    """FP32 values of E4M3 byte codes, as torch has them; NaN codes give NaN."""
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def _over_448(amax: Tensor) -> Tensor:
    return amax / torch.full_like(amax, E4M3_MAX)


def _448_over(amax: Tensor) -> Tensor:
    return torch.full_like(amax, E4M3_MAX) / amax


def _power_at_or_above(descale: Tensor) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(descale)))


def _of_descale(descale: Tensor, pow2: bool) -> Scales:
    if pow2:
        descale = _power_at_or_above(descale)
    return Scales(descale.reciprocal(), descale)


def te_kernel(amax: Tensor, dtype: torch.dtype, pow2: bool) -> Scales:
    """Transformer Engine's block scaling kernel, with its amax epsilon at the default 0."""
    factor = _448_over(amax)
    factor[torch.isinf(factor)] = torch.finfo(dtype).max
    if pow2:
        factor = ((factor.view(torch.int32) >> 23) << 23).view(
            torch.float32
        )  # exponent without mantissa
    factor[amax == 0] = 1.0
    return Scales(factor, factor.reciprocal())


def te_reference(amax: Tensor, dtype: torch.dtype, pow2: bool) -> Scales:
    """Transformer Engine's pure-torch reference, which its tests hold the kernel against."""
    factor = torch.nan_to_num(_448_over(amax), posinf=torch.finfo(dtype).max)
    if pow2:
        exponent = torch.frexp(factor).exponent
        factor = torch.ldexp(torch.ones_like(factor), exponent - 1)
    factor = torch.where(amax > 0, factor, 1.0)
    return Scales(factor, factor.reciprocal())


def vllm_weights(amax: Tensor, _dtype: torch.dtype, pow2: bool) -> Scales:
    """vLLM's per_block_cast_to_fp8, which quantises weights while they are loaded."""
    return _of_descale(_over_448(amax.clamp(min=1e-4)), pow2)


def vllm_weights_gpu(amax: Tensor, _dtype: torch.dtype, pow2: bool) -> Scales:
    """The same function as torch.compile makes it for a GPU: a constant divisor becomes a factor."""
    return _of_descale(amax.clamp(min=1e-4) * (1 / E4M3_MAX), pow2)


def vllm_activations(amax: Tensor, _dtype: torch.dtype, pow2: bool) -> Scales:
    """vLLM's CUDA kernel per_token_group_quant, which quantises the input of every FP8 linear."""
    descale = _over_448(amax.clamp(min=1e-10))
    return _of_descale(descale.clamp(min=1e-10) if pow2 else descale, pow2)


def nemo_rl(amax: Tensor, _dtype: torch.dtype, pow2: bool) -> Scales:
    """NeMo RL's cast, which quantises weights on their way to the rollout engine."""
    if pow2:
        exponent = torch.ceil(torch.log2(_over_448(amax))).clamp(-127, 127)
        factor = torch.where(exponent > -127, torch.exp2(-exponent), 1.0)
    else:
        factor = torch.where(amax > 0, amax.reciprocal() * E4M3_MAX, 1.0)
    return Scales(factor, factor.reciprocal())


def verl_triton(amax: Tensor, _dtype: torch.dtype, _pow2: bool) -> Scales:
    """veRL's Triton kernel, its usual way to quantise weights for the rollout engine."""
    return _of_descale(_over_448(amax.clamp(min=1e-10)), False)


def verl_torch(amax: Tensor, _dtype: torch.dtype, _pow2: bool) -> Scales:
    """veRL's way without Triton."""
    factor = torch.where(amax > 0, _448_over(amax), 1.0)
    return Scales(factor, factor.reciprocal())


_TE = "Transformer Engine"
_W, _A = Operand.WEIGHTS, Operand.ACTIVATIONS

RULES: tuple[EngineRule, ...] = tuple(
    rule
    for pow2 in (False, True)
    for rule in (
        EngineRule("te-kernel", f"{_TE}, block kernel", _W, pow2, te_kernel),
        EngineRule("te-reference", f"{_TE}, torch reference", _W, pow2, te_reference),
        EngineRule("vllm-weights", "vLLM, weights", _W, pow2, vllm_weights, clamps=False),
        EngineRule(
            "vllm-weights-gpu",
            "vLLM, weights, compiled for a GPU",
            _W,
            pow2,
            vllm_weights_gpu,
            clamps=False,
        ),
        EngineRule("nemo-rl", "NeMo RL", _W, pow2, nemo_rl, pads_with_last=True),
        EngineRule("verl-triton", "veRL, Triton", _W, pow2, verl_triton),
        EngineRule("verl-torch", "veRL, torch", _W, pow2, verl_torch),
        EngineRule("te-kernel", f"{_TE}, block kernel", _A, pow2, te_kernel),
        EngineRule(
            "vllm-activations", "vLLM, CUDA group kernel", _A, pow2, vllm_activations, divides=True
        ),
    )
    if not (pow2 and rule.name.startswith("verl"))  # has no power-of-two mode
)
