"""The layers that enter Megatron through its layer spec: planned linears and an RMS norm.

Parameters are the FP32 masters themselves; each layer rounds them to what it computes in. So there
is one copy of the weights, the FP8 codes come from the masters, and the optimiser is plain.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor, nn

from fp8rl.model.precision import FORMAT_OF_DTYPE, Format
from fp8rl.model.rounding import MEGATRON
from fp8rl.numerics.backends import Backend, Projections
from fp8rl.numerics.formats import Fp8Recipe
from fp8rl.numerics.linear import Fp8Weight, fp8_linear


class PlannedLinear:
    """What a Megatron parallel linear needs to compute in the format that the plan decides.

    `plan` must be called before the first forward. `effective` is the format of the last forward:
    what did run, not what was asked for.
    """

    requested: Format | None = None
    effective: Format | None = None
    fp8: Fp8Weight | None = None
    fp8_format: Format | None = None

    def plan(self, projections: Projections, fmt: Format, recipe: Fp8Recipe, backend: Backend) -> None:
        """Sets the format, the projections that this layer holds, and how FP8 is computed."""
        self.requested = fmt
        self.fp8 = Fp8Weight(projections, recipe, backend) if fmt.is_fp8 else None
        self.fp8_format = Format.of_weight(recipe.weight)  # what runs, not what was asked for

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """With a bias in x's dtype, added where vLLM adds it: after an FP8 product was rounded, and
        within a BF16 one."""
        if self.requested is None:
            raise RuntimeError("a planned linear was run before its precision was decided")
        bias = None if bias is None else bias.to(x.dtype)
        if self.fp8 is not None:
            self.effective = self.fp8_format
            product = fp8_linear(x, weight, self.fp8)
            return product if bias is None else product + bias
        self.effective = FORMAT_OF_DTYPE[str(x.dtype)]
        return rows_linear(x, weight.to(x.dtype), bias)


def rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's linear of x [..., K], whatever its strides: of a transposed x torch's own would make a
    copy of the weight for each step of the first axis."""
    rows = nn.functional.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return rows.view(*x.shape[:-1], len(weight))


class PlannedColumnLinear(PlannedLinear, ColumnParallelLinear):
    """Megatron's column-parallel linear, with the product in the planned format."""

    def _forward_impl(
        self, input: Tensor, weight: Tensor, bias: Any, *_: Any, allreduce_dgrad: bool, **__: Any
    ) -> Tensor:
        if allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=self.tp_group)
        return self._product(input, weight, bias)


class PlannedRowLinear(PlannedLinear, RowParallelLinear):
    """Megatron's row-parallel linear, with the product in the planned format."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
        return self._product(input, weight)


class RmsNorm(nn.Module):
    """RMS norm computed in FP32, of an input in the compute dtype or in FP32; its output is rounded.

    The weight is rounded to the compute dtype first: that is the weight which vLLM holds.
    """

    rounding = MEGATRON
    compute_dtype = torch.bfloat16

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        weight = self.weight.to(self.compute_dtype)
        if self.rounding.norm:
            return normed.to(self.compute_dtype) * weight
        return (normed * weight.float()).to(self.compute_dtype)


class ResidualAdd(nn.Module):
    """What a block adds to the residual stream: Megatron's bias-dropout-add without its first two.

    Called as Megatron calls it: once for the function, and that for the sum.
    """

    rounding = MEGATRON
    compute_dtype = torch.bfloat16

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        return self.add

    def add(self, out_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, _: float) -> Tensor:
        """The stream [..., hidden] after `out_with_bias`: in FP32, to be rounded by whom it concerns
        (the next norm reads it as it is, the next sum reads it rounded), or in the compute dtype."""
        out, bias = out_with_bias
        assert bias is None, "no block of the families here has a bias at its end"
        if self.rounding.residual:
            return residual.to(self.compute_dtype).float() + out.float()
        return residual + out
