"""The units that FP8's cost is attributed to: each layer, and each kind of linear over all layers."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fp8rl.model.dims import ModelDims
from fp8rl.model.names import Slot, name_table
from fp8rl.model.precision import Decision, Format, layer_of
from fp8rl.numerics.formats import Scheme

# By the end of Megatron-core's name; `*` of a pattern goes over dots.
_KINDS = {
    "qkv": ("linear_qkv.weight", "model.layers.*.qkv_proj"),
    "o": ("linear_proj.weight", "model.layers.*.o_proj"),
    "gate_up": ("linear_fc1.weight", "model.layers.*.gate_up_proj"),
    "down": ("linear_fc2.weight", "model.layers.*.down_proj"),
}
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Unit:
    """Linears that are kept in BF16 together. pattern: of `precision.exclude`, for them.

    parameters: Hugging Face names of those that the plan has in FP8. share: of the plan's FP8
    elements, and so of its FP8 products' multiply-adds.
    """

    name: str
    pattern: str
    parameters: frozenset[str]
    share: float

    @property
    def is_layer(self) -> bool:
        return self.name not in _KINDS


@dataclass(frozen=True)
class Units:
    """Those of a plan; see `units_of`. sizes: {parameter in FP8: (elements, bytes more in BF16)}."""

    plan: Mapping[str, Decision]
    units: tuple[Unit, ...]
    sizes: Mapping[str, tuple[int, int]]

    def kept(self, units: Iterable[Unit]) -> dict[str, Decision]:
        """The plan with `units` in BF16."""
        return _in_bf16(self.plan, _parameters(units))

    def alone(self, unit: Unit | None) -> dict[str, Decision]:
        """The plan with nothing but `unit` in FP8; None: with nothing."""
        chosen = frozenset() if unit is None else unit.parameters
        return _in_bf16(self.plan, self.sizes.keys() - chosen)

    def bytes_more(self, units: Iterable[Unit]) -> int:
        """Bytes that `units` take more in BF16 than in FP8 with scales."""
        return sum(self.sizes[name][1] for name in _parameters(units))

    def share(self, units: Iterable[Unit]) -> float:
        """The share of the FP8 elements that is in `units`."""
        return sum(self.sizes[name][0] for name in _parameters(units)) / self.elements

    @property
    def elements(self) -> int:
        return sum(elements for elements, _ in self.sizes.values())


def units_of(plan: Mapping[str, Decision], dims: ModelDims, scheme: Scheme) -> Units:
    """The layers, in order, and the kinds in which `plan` has something in FP8. scheme: of weights."""
    sizes: dict[str, tuple[int, int]] = {}
    layers: dict[int, set[str]] = {}
    kinds: dict[str, set[str]] = {kind: set() for kind in _KINDS}
    for slot in name_table(dims):
        if not plan[slot.hf[0]].format.is_fp8:
            continue
        assert slot.columns is not None
        for name, rows in zip(slot.hf, slot.rows, strict=True):
            down, across = scheme.scale_shape(rows, slot.columns)
            elements = rows * slot.columns
            sizes[name] = elements, 2 * elements - (elements + _SCALE_BYTES * down * across)
            layer = layer_of(name)
            assert layer is not None
            layers.setdefault(layer, set()).add(name)
            kinds[_kind(slot)].add(name)
    total = sum(elements for elements, _ in sizes.values())

    def unit(name: str, pattern: str, names: set[str]) -> Unit:
        return Unit(name, pattern, frozenset(names), sum(sizes[n][0] for n in names) / total)

    units = [unit(f"layer {n}", f"model.layers.{n}.*", names) for n, names in layers.items()]
    units += [unit(kind, _KINDS[kind][1], names) for kind, names in kinds.items() if names]
    return Units(plan, tuple(units), sizes)


def exclude_override(already: Sequence[str], units: Iterable[Unit]) -> str:
    """The value to run a recipe with so that `units` stay in BF16. already: what it excludes now."""
    return f"precision.exclude={json.dumps([*already, *(unit.pattern for unit in units)])}"


def _kind(slot: Slot) -> str:
    return next(kind for kind, (end, _) in _KINDS.items() if slot.megatron.endswith(end))


def _parameters(units: Iterable[Unit]) -> frozenset[str]:
    return frozenset().union(*(unit.parameters for unit in units))


def _in_bf16(plan: Mapping[str, Decision], names: Iterable[str]) -> dict[str, Decision]:
    changed = {name: replace(plan[name], format=Format.BF16, rule="attribution") for name in names}
    return {**plan, **changed}
