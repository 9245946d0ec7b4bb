"""The FP32 product of the dequantised operands: the definition that other backends are held to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rl.numerics.backends import (
    GRADIENT,
    FusedWeight,
    Projections,
    along_outputs,
    along_tokens,
)
from fp8rl.numerics.formats import Fp8Recipe, Scheme
from fp8rl.numerics.quantise import round_trip


@dataclass(frozen=True)
class _Prepared:
    """fused: FP32 [N, K] in fused order. by_projection: FP32 [N, K], one after the other."""

    projections: Projections
    fused: Tensor
    by_projection: Tensor | None


class Reference:
    """FP32 products of dequantised operands."""

    def check(self, recipe: Fp8Recipe) -> None:
        """Every recipe runs on every device."""

    def prepare(self, weight: FusedWeight) -> _Prepared:
        forward = [part.dequantise() for part in weight.forward]
        backward = None
        if weight.backward is weight.forward:
            backward = torch.cat(forward)
        elif weight.backward is not None:
            backward = torch.cat([part.dequantise() for part in weight.backward])
        return _Prepared(weight.projections, weight.projections.join(forward), backward)

    def forward(self, x: Tensor, prepared: _Prepared, scheme: Scheme) -> Tensor:
        return (round_trip(x, scheme, name="activation") @ prepared.fused.t()).to(x.dtype)

    def dgrad(self, dy: Tensor, prepared: _Prepared, scheme: Scheme) -> Tensor:
        assert prepared.by_projection is not None
        parts = along_outputs(dy, scheme, prepared.projections)
        rounded = [round_trip(part, scheme, name=GRADIENT) for part in parts]
        joined = rounded[0] if len(rounded) == 1 else torch.cat(rounded, 1)
        return (joined @ prepared.by_projection).to(dy.dtype)

    def wgrad(self, dy: Tensor, x: Tensor, recipe: Fp8Recipe, projections: Projections) -> Tensor:
        scheme = recipe.gradient.turned()
        parts = [
            round_trip(part, scheme, name=GRADIENT) for part in along_tokens(dy, scheme, projections)
        ]
        left = parts[0] if len(parts) == 1 else projections.join_columns(parts)
        return left.t() @ round_trip(x, recipe.input.turned(), name="activation")


BACKEND = Reference()
