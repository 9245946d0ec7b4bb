"""FP8 products on the CPU's matrix unit, exactly as block-scaled tensor cores compute them.

Every FP8 value is exact in BF16, so AMX multiplies FP8 values without error and sums them in FP32; at
the end of each group along the contraction the sum is scaled by both descales and added (amx.cpp).
The result differs from the reference only by the order of FP32 sums. It is the fast way to run FP8
linears here: the reference needs FP32 products, six times slower than BF16 ones on such a CPU.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rl.numerics import amx
from fp8rl.numerics.backends import (
    GRADIENT,
    BackendError,
    FusedWeight,
    Projections,
    along_outputs,
    along_tokens,
)
from fp8rl.numerics.formats import Fp8Recipe, Scheme
from fp8rl.numerics.quantise import quantise_values, spread


@dataclass(frozen=True)
class _Prepared:
    """forward: rows are outputs, in fused order. backward: rows are inputs."""

    projections: Projections
    forward: amx.Right
    groups: tuple[int, ...]
    backward: amx.Right | None
    backward_groups: tuple[int, ...]


def _runs(size: int, length: int | None) -> tuple[int, ...]:
    """Lengths of the groups along an axis of `size`."""
    length = length or size
    return tuple(min(length, size - start) for start in range(0, size, length))


def _per_row(scale_inv: Tensor, scheme: Scheme, rows: int) -> Tensor:
    """[tiles down, G] -> [rows, G]: the descales of each row."""
    high = scheme.tile[0]
    if high == 1:
        return scale_inv
    return spread(scale_inv, Scheme(scheme.element, (high, 1), scheme.rule), (rows, 1)).expand(
        rows, scale_inv.shape[1]
    )


class Amx:
    """Exact products of FP8 values in AMX tiles."""

    def check(self, recipe: Fp8Recipe) -> None:
        reason = amx.unavailable()
        if reason is not None:
            raise BackendError(f"the amx backend cannot run: {reason}. Set precision.backend=reference")

    def prepare(self, weight: FusedWeight) -> _Prepared:
        projections, scheme = weight.projections, weight.forward[0].scheme
        # One byte an element: while few tokens are decoded, reading the weights is what takes time.
        codes = projections.join([part.codes for part in weight.forward])
        scales = projections.join(
            [_per_row(part.scale_inv, scheme, len(part.codes)) for part in weight.forward]
        )
        groups = _runs(codes.shape[1], scheme.tile[1])
        forward = amx.pack_right(codes, scales, groups, contract=1)
        if weight.backward is None:
            return _Prepared(projections, forward, groups, None, ())
        # The backward parts lie turned: seen from their inputs, their tiles are those of `scheme`.
        columns = codes.shape[1]
        codes = torch.cat([part.codes for part in weight.backward])
        scales = torch.cat([_per_row(p.scale_inv.t(), scheme, columns).t() for p in weight.backward])
        cuts = tuple(run for size in projections.sizes for run in _runs(size, scheme.tile[1]))
        backward = amx.pack_right(codes, scales, cuts, contract=0)
        return _Prepared(projections, forward, groups, backward, cuts)

    def forward(self, x: Tensor, prepared: _Prepared, scheme: Scheme) -> Tensor:
        values, scales = quantise_values(x, scheme, name="activation")
        left = amx.pack_left(values, _per_row(scales, scheme, len(x)), prepared.groups, contract=1)
        return _as(amx.product(left, prepared.forward, _out(x)), x.dtype)

    def dgrad(self, dy: Tensor, prepared: _Prepared, scheme: Scheme) -> Tensor:
        assert prepared.backward is not None
        parts = [
            quantise_values(part, scheme, name=GRADIENT)
            for part in along_outputs(dy, scheme, prepared.projections)
        ]
        values = torch.cat([part[0] for part in parts], 1)
        scales = torch.cat([_per_row(part[1], scheme, len(dy)) for part in parts], 1)
        left = amx.pack_left(values, scales, prepared.backward_groups, contract=1)
        return _as(amx.product(left, prepared.backward, _out(dy)), dy.dtype)

    def wgrad(self, dy: Tensor, x: Tensor, recipe: Fp8Recipe, projections: Projections) -> Tensor:
        scheme = recipe.gradient.turned()
        groups = _runs(len(dy), scheme.tile[0])
        parts = [
            quantise_values(part, scheme, name=GRADIENT)
            for part in along_tokens(dy, scheme, projections)
        ]
        scales = [s.expand(len(groups), v.shape[1]) for v, s in parts]
        if len(parts) == 1:
            values, scale = parts[0][0], scales[0]
        else:
            values = projections.join_columns([v for v, _ in parts])
            scale = projections.join_columns(scales)
        left = amx.pack_left(values, scale, groups, contract=0)
        values, scale = quantise_values(x, recipe.input.turned(), name="activation")
        scale = scale.expand(len(groups), x.shape[1])
        right = amx.pack_right(values, scale, groups, contract=0)
        return amx.product(left, right, torch.float32)


def _out(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float32


def _as(product: Tensor, dtype: torch.dtype) -> Tensor:
    return product if product.dtype is dtype else product.to(dtype)


BACKEND = Amx()
