"""The precision plan: one ordered list of rules, one decision for every parameter.

Rollout, learner and requantisation read it, by Hugging Face name. The first rule that matches decides:

    1  never      embeddings, output projection, norms, biases, routers: BF16, whatever a recipe says
    2  exclude    the recipe's patterns: BF16
    3  first / last layers of the recipe: BF16
    4  include    where the recipe has patterns, linears that match none: BF16
    5  linear     the linears of the layers: the side's format

A pattern is a name, a name with `*` and `?`, or `re:` and a regular expression, and has to match a
whole name (a bare `mlp.gate` must not match `mlp.gate_proj`); the trailing `.weight` may be left out.
It may name a projection as Hugging Face does or the fused layer as vLLM or Megatron-core do
(qkv_proj, linear_qkv). A parameter that no rule covers is an error, and so is a pattern that matches
nothing: a misspelt name would otherwise quantise the layer that was to be kept. Imports without torch.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from fp8rl.model.dims import ModelDims
from fp8rl.model.names import Slot, name_table
from fp8rl.numerics.formats import Scaling, Scheme, weight_scheme

_REGEX = "re:"


class Format(StrEnum):
    """Number format of a parameter in the forward pass."""

    BF16 = "bf16"
    FP32 = "fp32"  # never planned; effective where something runs wider than it was asked to
    FP8_BLOCK = "fp8_block"  # 128x128 blocks
    FP8_TENSOR = "fp8_tensor"  # one scale a tensor
    FP8_CHANNEL = "fp8_channel"  # one scale a row
    FP8_MXFP8 = "fp8_mxfp8"  # 1x32 groups, UE8M0

    @staticmethod
    def of_weight(scheme: Scheme) -> "Format":
        """The format of a weight that is quantised by `scheme`: from its tiles, not from a name."""
        return next(
            Format(f"fp8_{scaling.value}")
            for scaling in Scaling
            if weight_scheme(scaling).tile == scheme.tile
        )

    @property
    def is_fp8(self) -> bool:
        return self.value.startswith("fp8")


class PrecisionPlanError(ValueError):
    """The rules do not decide every parameter, or two parts disagree on a decision."""


@dataclass(frozen=True)
class Decision:
    """The format of one parameter and the rule that decided it."""

    name: str
    format: Format
    rule: str


@dataclass(frozen=True)
class PlanRules:
    """What a recipe says on precision, for one side (rollout or learner)."""

    linear: Format
    first_layers_bf16: int = 0
    last_layers_bf16: int = 0
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


_NEVER = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "*norm.weight",
    "*_proj.bias",
    "*.mlp.gate.weight",
    "*router.weight",
)
_LINEAR_SUFFIXES = tuple(f"{p}_proj.weight" for p in ("q", "k", "v", "o", "gate", "up", "down"))


def decide(name: str, rules: PlanRules, layers: int, fused: tuple[str, ...] = ()) -> Decision:
    """The decision for the parameter `name` of a model with `layers` layers.

    fused: names of the fused layers that hold it in the engines.
    """
    names = (name, *fused)
    for pattern in _NEVER:
        if fnmatchcase(name, pattern):
            return Decision(name, Format.BF16, f"never: {pattern}")
    for pattern in rules.exclude:
        if _matches_any(names, pattern):
            return Decision(name, Format.BF16, f"exclude: {pattern}")
    layer = layer_of(name)
    if layer is not None and layer < rules.first_layers_bf16:
        return Decision(name, Format.BF16, f"first_layers_bf16={rules.first_layers_bf16}")
    if layer is not None and layer >= layers - rules.last_layers_bf16:
        return Decision(name, Format.BF16, f"last_layers_bf16={rules.last_layers_bf16}")
    if layer is not None and name.endswith(_LINEAR_SUFFIXES):
        matching = [pattern for pattern in rules.include if _matches_any(names, pattern)]
        if rules.include and not matching:
            return Decision(name, Format.BF16, "not in include")
        return Decision(name, rules.linear, f"include: {matching[0]}" if matching else "linear")
    raise PrecisionPlanError(f"no precision rule covers the parameter {name!r}")


def layer_of(name: str) -> int | None:
    """The layer number in a Hugging Face parameter name, or None outside the layers."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None


def _matches_any(names: Iterable[str], pattern: str) -> bool:
    return any(_matches(name, pattern) for name in names)


def _matches(name: str, pattern: str) -> bool:
    """Whole-name match, with or without the trailing `.weight`."""
    for candidate in (name, name.removesuffix(".weight")):
        if pattern.startswith(_REGEX):
            if re.fullmatch(pattern.removeprefix(_REGEX), candidate):
                return True
        elif fnmatchcase(candidate, pattern):
            return True
    return False


def _fused_names(slot: Slot) -> tuple[str, ...]:
    return (slot.vllm, slot.megatron)


def make_plan(rules: PlanRules, dims: ModelDims) -> dict[str, Decision]:
    """Decisions for every parameter of the model, by Hugging Face name.

    Raises PrecisionPlanError for a pattern that matches nothing or is no regular expression, and
    where projections that both engines hold fused (q, k, v; gate, up) would need different formats.
    """
    table = name_table(dims)
    names = [(name, *_fused_names(slot)) for slot in table for name in slot.hf]
    linears = [(name, *_fused_names(slot)) for slot in table if slot.is_linear for name in slot.hf]
    patterns = [("include", pattern, linears) for pattern in rules.include]
    patterns += [("exclude", pattern, names) for pattern in rules.exclude]
    for key, pattern, candidates in patterns:
        try:
            found = any(_matches_any(each, pattern) for each in candidates)
        except re.error as error:
            raise PrecisionPlanError(f"{key}: {pattern!r} is no regular expression: {error}") from None
        if not found:
            what = "linear's whole name" if key == "include" else "whole name"
            raise PrecisionPlanError(
                f"{key}: {pattern!r} matches no {what}; names look like {linears[0][0]!r} or, "
                f"fused, {linears[0][1]!r}"
            )
    plan = {each[0]: decide(each[0], rules, dims.layers, each[1:]) for each in names}
    for slot in table:
        formats = {plan[name].format for name in slot.hf}
        if len(formats) > 1:
            raise PrecisionPlanError(
                f"{', '.join(slot.hf)} are one fused layer in both engines and need one format; "
                "name all of them in include or exclude, or none"
            )
    return plan


def assert_effective(
    plan: Mapping[str, Decision], effective: Mapping[str, Format], *, where: str
) -> None:
    """Raises PrecisionPlanError unless `effective` is the plan, parameter by parameter."""
    wrong = [
        f"{name}: requested {decision.format}, effective {effective.get(name, 'missing')}"
        for name, decision in plan.items()
        if effective.get(name) != decision.format
    ]
    wrong += [f"{name}: not in the plan" for name in effective if name not in plan]
    if wrong:
        raise PrecisionPlanError(
            f"{where} does not run the precision that the recipe asks for:\n  " + "\n  ".join(wrong)
        )


def assert_same_sets(learner: Mapping[str, Format], rollout: Mapping[str, Format]) -> None:
    """Raises PrecisionPlanError where both sides compute in FP8 but not with the same parameters.

    learner, rollout: effective formats. A layer that only one side quantises is a mismatch that no
    correction was asked for. Where a whole side is in BF16 there is nothing to compare.
    """
    sides = (learner, rollout)
    if not all(any(fmt.is_fp8 for fmt in side.values()) for side in sides):
        return
    wrong = [
        f"{name}: learner {learner.get(name, 'missing')}, rollout {rollout.get(name, 'missing')}"
        for name in sorted(learner.keys() | rollout.keys())
        if learner.get(name) != rollout.get(name)
    ]
    if wrong:
        raise PrecisionPlanError(
            "learner and rollout engine do not quantise the same parameters:\n  " + "\n  ".join(wrong)
        )


def effective_rows(
    plan: Mapping[str, Decision], effective: Mapping[str, Format], *, where: str
) -> list[dict[str, str]]:
    """Requested and effective format of every parameter, and the rule; raises as `assert_effective`."""
    assert_effective(plan, effective, where=where)
    return [
        {
            "parameter": name,
            "requested": decision.format.value,
            "effective": effective[name].value,
            "rule": decision.rule,
        }
        for name, decision in plan.items()
    ]


def both_sides(learner: list[dict[str, str]], rollout: list[dict[str, str]]) -> dict[str, list[str]]:
    """The `effective_rows` of both sides as one table, by column. Raises as `assert_same_sets`."""
    sides = {"learner": learner, "rollout": rollout}
    formats = {
        side: {row["parameter"]: Format(row["effective"]) for row in rows}
        for side, rows in sides.items()
    }
    assert_same_sets(formats["learner"], formats["rollout"])
    by_name = {row["parameter"]: row for row in rollout}
    columns: dict[str, list[str]] = {"parameter": [row["parameter"] for row in learner]}
    for side in ("rollout", "learner"):
        rows = learner if side == "learner" else [by_name[n] for n in columns["parameter"]]
        for what in ("requested", "effective"):
            columns[f"{side}_{what}"] = [row[what] for row in rows]
    columns["rule"] = [row["rule"] for row in learner]
    return columns


def count_formats(formats: Iterable[str]) -> str:
    """How many parameters are in each format, as text: "28 fp8_block, 10 bf16"."""
    counts = Counter(formats)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


# What a product of each dtype is called here. Keyed by text, so that torch is not imported.
FORMAT_OF_DTYPE = {"torch.bfloat16": Format.BF16, "torch.float32": Format.FP32}
