"""Rotary position embedding of queries and keys, by the angles that vLLM tabulates."""

import math

import torch
from torch import Tensor

from fp8rl.model.dims import Llama3Rope, ModelDims


def frequencies(dims: ModelDims) -> Tensor:
    """FP32 [head_dim / 2]: radians a position, of the fastest pair first."""
    exponents = torch.arange(0, dims.head_dim, 2, dtype=torch.float32) / dims.head_dim
    found = 1.0 / (dims.rope_theta**exponents)
    return found if dims.rope_scaling is None else llama3_frequencies(found, dims.rope_scaling)


def llama3_frequencies(inv_freq: Tensor, rope: Llama3Rope) -> Tensor:
    """FP32 [head_dim / 2]: rotary frequencies as Llama 3.1 stretches them.

    A frequency whose wave is longer than original_max_positions / low_freq_factor is divided by
    `factor`; one that is shorter than original_max_positions / high_freq_factor stays; in between the
    two are mixed. Source: Llama 3.1's reference code (apply_scaling). Megatron-core has its own with
    fixed factors.
    """
    waves = 2 * math.pi / inv_freq
    turns = rope.original_max_positions / waves
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    mixed = (1 - share) * inv_freq / rope.factor + share * inv_freq
    found = torch.where(turns < rope.low_freq_factor, inv_freq / rope.factor, mixed)
    return torch.where(turns > rope.high_freq_factor, inv_freq, found)


class Rotary:
    """The rotation of a model of `dims`. Cosines and sines are rounded to x's dtype, as engines do."""

    def __init__(self, dims: ModelDims) -> None:
        self._frequencies = frequencies(dims)
        self._table: tuple[Tensor, Tensor] | None = None

    def table(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [length, head_dim / 2] of positions 0 .. length - 1."""
        held = self._table
        if held is None or len(held[0]) < length or held[0].dtype != dtype:
            angles = torch.arange(length, dtype=torch.float32)[:, None] * self._frequencies
            held = self._table = (angles.cos().to(dtype), angles.sin().to(dtype))
        return held[0][:length], held[1][:length]

    def __call__(self, x: Tensor, *, once: bool) -> Tensor:
        """x [seq, ..., heads, head_dim] rotated by its position, halves together (not interleaved).

        once: computed in FP32 and rounded at the end, as vLLM's kernels do; else each product and the
        sum are rounded to x's dtype, as Megatron-core does.
        """
        cos, sin = (t.view(len(t), *(1,) * (x.ndim - 2), -1) for t in self.table(len(x), x.dtype))
        wide = x.float() if once else x
        first, second = wide.chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return turned.to(x.dtype)
