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
)


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
        self._dequantised: Tensor | None = None

    def update(self, weight: Tensor) -> None:
        """Quantises `weight` [N, K] unless this very version of it is held already."""
        current = (id(weight), weight._version)
        if self._of == current:
            return
        parts = self.projections.split(weight.detach())
        self._quantised = [
            quantise_weight(part, power_of_two=self.power_of_two, name=name)
            for name, part in zip(self.projections.names, parts, strict=True)
        ]
        self._dequantised = self.projections.join(
            [dequantise_weight(q.codes, q.scale_inv) for q in self._quantised]
        )
        self._of = current

    def dequantised(self, weight: Tensor) -> Tensor:
        """FP32 [N, K] in fused row order."""
        self.update(weight)
        assert self._dequantised is not None
        return self._dequantised

    def quantised(self, weight: Tensor) -> dict[str, QuantisedWeight]:
        """Codes and descales by projection name: what is published."""
        self.update(weight)
        return dict(zip(self.projections.names, self._quantised, strict=True))


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fp8: Fp8Weight, pow2_activation: bool) -> Tensor:
        x_TK = x.reshape(-1, x.shape[-1])
        w_NK = fp8.dequantised(weight)
        y_TN = round_trip_groups(x_TK, power_of_two=pow2_activation) @ w_NK.t()
        ctx.save_for_backward(x_TK, weight)
        ctx.fp8, ctx.pow2, ctx.x_shape = fp8, pow2_activation, x.shape
        ctx.w_NK = w_NK
        return y_TN.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (dy,) = grads
        x_TK, weight = ctx.saved_tensors
        dy_TN = dy.reshape(-1, dy.shape[-1])
        dx = dw = None
        if ctx.needs_input_grad[0]:
            parts_NT = ctx.fp8.projections.split(dy_TN.t())
            rounded = [_along_outputs(part, ctx.pow2) for part in parts_NT]
            dx = ctx.fp8.projections.join(rounded).t() @ ctx.w_NK
            dx = dx.to(x_TK.dtype).view(ctx.x_shape)
        if ctx.needs_input_grad[1]:
            dy_NT = round_trip_groups(dy_TN.t(), power_of_two=ctx.pow2, name="output gradient")
            x_KT = round_trip_groups(x_TK.t(), power_of_two=ctx.pow2)
            dw = (dy_NT @ x_KT.t()).to(weight.dtype)
        return dx, dw, None, None


def _along_outputs(dy_NT: Tensor, power_of_two: bool) -> Tensor:
    return round_trip_groups(dy_NT.t(), power_of_two=power_of_two, name="output gradient").t()


def fp8_linear(
    x: Tensor, weight: Tensor, fp8: Fp8Weight, *, power_of_two_activation: bool = False
) -> Tensor:
    """y = x W^T with FP8 operands in all three products.

    x: [..., K], BF16 or FP32. weight: the FP32 master [N, K]; its gradient comes back in its dtype.
    Returns [..., N] in x's dtype. Raises NonFiniteError where an operand holds NaN or Inf.
    """
    result: Tensor = _Fp8Linear.apply(x, weight, fp8, power_of_two_activation)
    return result
