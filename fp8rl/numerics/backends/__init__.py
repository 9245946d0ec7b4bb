"""The products of an FP8 linear, behind one interface; each module here is one way to compute them.

    reference   FP32 product of the dequantised operands, on any device: what the others are held to
    amx         exact products of FP8 values in AMX tiles, FP32 sums, scaled group by group (CPU)
    torch       torch.nn.functional.scaled_mm: FP8 tensor cores with nothing but PyTorch (Hopper)

`transformer_engine` is not among them: there Megatron-core builds Transformer Engine's own layers
(fp8rl/model/transformer_engine.py, not wired up yet). A backend is chosen by name and never swapped
for another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8rl.numerics.formats import BackendError, Fp8Recipe, Scheme
from fp8rl.numerics.quantise import Quantised

# By name; a module called `torch` would hide the package of that name inside this one.
_MODULES = {"reference": "reference", "amx": "amx", "torch": "scaled_mm"}
BACKENDS = tuple(_MODULES)


@dataclass(frozen=True)
class Projections:
    """The projections in a fused layer.

    names: Hugging Face names. sizes: output rows of each. order: int64 [N]; fused row of each row
    of the projections laid one after the other. None where the fused layer already has that order.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    order: Tensor | None = None

    @property
    def label(self) -> str:
        """The layer, for people."""
        return ", ".join(self.names)

    def split(self, x: Tensor) -> list[Tensor]:
        """`x` [N, ...] in fused row order -> one tensor per projection, in its own row order."""
        rows = x if self.order is None else x.index_select(0, self.order)
        return list(rows.split(self.sizes))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`."""
        rows = torch.cat(list(parts))
        if self.order is None:
            return rows
        return torch.empty_like(rows).index_copy_(0, self.order, rows)

    def split_columns(self, x: Tensor) -> list[Tensor]:
        """As `split` for the columns of `x` [T, N]."""
        columns = x if self.order is None else x.index_select(1, self.order)
        return list(columns.split(self.sizes, 1))

    def join_columns(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `split_columns`."""
        columns = torch.cat(list(parts), 1)
        if self.order is None:
            return columns
        return torch.empty_like(columns).index_copy_(1, self.order, columns)


@dataclass(frozen=True)
class FusedWeight:
    """A fused weight in FP8, by projection.

    forward: each projection [N_p, K] in tiles along K. backward: in tiles along N_p, quantised from
    high precision too; the same objects where the tiles are square. None where nothing is trained.
    """

    projections: Projections
    forward: list[Quantised]
    backward: list[Quantised] | None


class Backend(Protocol):
    """The three products. Shapes: x [T, K], dy [T, N], W [N, K]; N in fused order."""

    def check(self, recipe: Fp8Recipe) -> None:
        """Raises BackendError where the backend cannot compute `recipe` on this machine."""

    def prepare(self, weight: FusedWeight) -> Any:
        """What the products need of a weight, made once per version."""

    def forward(self, x: Tensor, prepared: Any, scheme: Scheme) -> Tensor:
        """q(x) . Wq^T, [T, N] in x's dtype."""

    def dgrad(self, dy: Tensor, prepared: Any, scheme: Scheme) -> Tensor:
        """q(dy) . Wq, [T, K] in dy's dtype; groups lie over each projection by itself."""

    def wgrad(self, dy: Tensor, x: Tensor, recipe: Fp8Recipe, projections: Projections) -> Tensor:
        """q(dy)^T . q(x), [N, K] FP32; both operands in tiles along the tokens."""


def backend(name: str) -> Backend:
    """The backend `name`. Raises BackendError for an unknown one."""
    if name == "transformer_engine":
        raise BackendError(
            "transformer_engine is no backend of products: Megatron-core builds its layers, and the "
            "learner's CUDA side is not wired up yet. Set precision.backend to another"
        )
    if name not in BACKENDS:
        raise BackendError(f"no FP8 backend {name!r}; there are {', '.join(BACKENDS)}")
    module: Backend = import_module(f"fp8rl.numerics.backends.{_MODULES[name]}").BACKEND
    return module


GRADIENT = "output gradient"


def along_outputs(dy: Tensor, scheme: Scheme, projections: Projections) -> list[Tensor]:
    """`dy` [T, N] cut so that no tile of `scheme` crosses from one projection to the next."""
    width = scheme.tile[1]
    # Tiles cannot cross where projections end on a tile's edge: then one tensor does for all.
    if width is not None and all(size % width == 0 for size in projections.sizes[:-1]):
        return [dy if projections.order is None else dy.index_select(1, projections.order)]
    return projections.split_columns(dy)


def along_tokens(dy: Tensor, scheme: Scheme, projections: Projections) -> list[Tensor]:
    """`dy` [T, N] as it is, or cut by projection where a tile of `scheme` would cross them.

    `scheme` lies along the tokens: only a tile as wide as the tensor (one scale for all) crosses.
    """
    if scheme.tile[1] is not None or len(projections.sizes) == 1:
        return [dy]
    return projections.split_columns(dy)
