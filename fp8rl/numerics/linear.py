"""The FP8 linear: one block-scaled product forward, two backward.

    forward  y  = q(x along K)      . Wq^T        q = groups of 128, Wq = 128x128 blocks
    dgrad    dx = q(dy along N)     . Wq
    wgrad    dW = q(dy along T)^T   . q(x along T)

T tokens, K inputs, N outputs. Every operand is quantised along the axis that its product contracts,
from the high-precision tensor (a transposed copy is quantised again, not transposed). The product is
the FP32 product of the dequantised operands: the reference that other backends are compared with.

A layer may hold several Hugging Face projections fused, and in another row order (Megatron
interleaves q, k, v per KV group). Blocks and gradient groups lie over each projection by itself, in
its own order, so that the learner's codes are those of the published weights: `Projections` says
where each one's rows are.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.blockwise import (
    QuantisedWeight,
    dequantise_weight,
    quantise_weight,
    round_trip_groups,
    round_trip_tokens,
)
from fp8rl.numerics.formats import BLOCK

_GRADIENT = "output gradient"


@dataclass(frozen=True)
class Projections:
    """The projections in a fused layer.

    names: Hugging Face names. sizes: output rows of each. order: int64 [N]; fused row of each row
    of the projections laid one after the other. None where the fused layer already has that order.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    order: Tensor | None = None

    def split(self, x: Tensor) -> list[Tensor]:
        """`x` [N, ...] in fused row order -> one tensor per projection, in its own row order."""
        rows = x if self.order is None else x.index_select(0, self.order)
        return list(rows.split(self.sizes))

    def join(self, parts: list[Tensor]) -> Tensor:
        """The inverse of `split`."""
        rows = torch.cat(parts)
        if self.order is None:
            return rows
        return torch.empty_like(rows).index_copy_(0, self.order, rows)


class Fp8Weight:
    """A layer's weight in FP8, quantised once per change of the master weight.

    The master weight's version counter tells when it changed; writes through `.data` do not count
    and are not to be used on it.
    """

    def __init__(self, projections: Projections, *, power_of_two: bool = False) -> None:
        self.projections = projections
        self.power_of_two = power_of_two
        self._of: tuple[int, int] | None = None
        self._quantised: list[QuantisedWeight] = []
        self._by_projection = torch.empty(0)
        self._fused = torch.empty(0)

    def _update(self, weight: Tensor) -> None:
        current = (id(weight), weight._version)
        if self._of == current:
            return
        parts = self.projections.split(weight.detach())
        self._quantised = [
            quantise_weight(part, power_of_two=self.power_of_two, name=name)
            for name, part in zip(self.projections.names, parts, strict=True)
        ]
        dequantised = [dequantise_weight(q.codes, q.scale_inv) for q in self._quantised]
        self._by_projection = torch.cat(dequantised)
        self._fused = self.projections.join(dequantised)
        self._of = current

    def dequantised(self, weight: Tensor) -> Tensor:
        """FP32 [N, K] in fused row order: what the forward product contracts with."""
        self._update(weight)
        return self._fused

    def dequantised_by_projection(self, weight: Tensor) -> Tensor:
        """FP32 [N, K], the projections one after the other: what dgrad contracts with."""
        self._update(weight)
        return self._by_projection

    def quantised(self, weight: Tensor) -> dict[str, QuantisedWeight]:
        """Codes and descales by projection name: what is published."""
        self._update(weight)
        return dict(zip(self.projections.names, self._quantised, strict=True))


def _round_trip_outputs(dy_TN: Tensor, projections: Projections, power_of_two: bool) -> Tensor:
    """Gradients in groups of 128 along each projection's outputs: FP32 [T, N], by projection."""
    columns = dy_TN if projections.order is None else dy_TN.index_select(1, projections.order)
    # Groups cannot straddle projections that end on a group boundary: then one pass does for all.
    aligned = all(size % BLOCK == 0 for size in projections.sizes[:-1])
    parts = [columns] if aligned else list(columns.split(projections.sizes, 1))
    rounded = [round_trip_groups(p, power_of_two=power_of_two, name=_GRADIENT) for p in parts]
    return rounded[0] if aligned else torch.cat(rounded, 1)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fp8: Fp8Weight, pow2_activation: bool) -> Tensor:
        x_TK = x.reshape(-1, x.shape[-1])
        y_TN = round_trip_groups(x_TK, power_of_two=pow2_activation) @ fp8.dequantised(weight).t()
        ctx.save_for_backward(x_TK, weight)
        ctx.fp8, ctx.pow2, ctx.x_shape = fp8, pow2_activation, x.shape
        return y_TN.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (dy,) = grads
        x_TK, weight = ctx.saved_tensors
        dy_TN = dy.reshape(-1, dy.shape[-1])
        dx = dw = None
        if ctx.needs_input_grad[0]:
            rounded = _round_trip_outputs(dy_TN, ctx.fp8.projections, ctx.pow2)
            dx = rounded @ ctx.fp8.dequantised_by_projection(weight)
            dx = dx.to(x_TK.dtype).view(ctx.x_shape)
        if ctx.needs_input_grad[1]:
            # A token without gradient (padding) adds nothing, but would share a scale with others.
            has_gradient = (dy_TN != 0).any(1, keepdim=True)
            x_TK = torch.where(has_gradient, x_TK, torch.zeros_like(x_TK))
            dy_along_T = round_trip_tokens(dy_TN, power_of_two=ctx.pow2, name=_GRADIENT)
            x_along_T = round_trip_tokens(x_TK, power_of_two=ctx.pow2)
            dw = (dy_along_T.t() @ x_along_T).to(weight.dtype)
        return dx, dw, None, None


def fp8_linear(
    x: Tensor, weight: Tensor, fp8: Fp8Weight, *, power_of_two_activation: bool = False
) -> Tensor:
    """y = x W^T with FP8 operands in all three products.

    x: [..., K], BF16 or FP32. weight: the FP32 master [N, K]; its gradient comes back in its dtype.
    Returns [..., N] in x's dtype. Raises NonFiniteError where an operand holds NaN or Inf.
    """
    result: Tensor = _Fp8Linear.apply(x, weight, fp8, power_of_two_activation)
    return result
