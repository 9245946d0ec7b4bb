"""The precision plan: one ordered list of rules, one decision for every parameter.

Rollout and learner both read it, by Hugging Face name. A parameter that no rule covers is an error,
and so is a `keep_bf16` pattern that matches nothing (a misspelt name would otherwise quantise the
layer that the user wanted kept). Imports without torch.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from fp8rl.model.dims import ModelDims
from fp8rl.model.names import name_table


class Format(StrEnum):
    """Number format of a parameter in the forward pass."""

    BF16 = "bf16"
    FP32 = "fp32"  # never planned; effective where something runs wider than it was asked to
    FP8_BLOCK = "fp8_block"  # E4M3, 128x128 blocks, FP32 descales


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
    keep_bf16: tuple[str, ...] = ()


# Never quantised, on either side, whatever the recipe says.
_NEVER = ("model.embed_tokens.weight", "lm_head.weight", "*norm.weight")
_LINEAR_SUFFIXES = tuple(f"{p}_proj.weight" for p in ("q", "k", "v", "o", "gate", "up", "down"))


def decide(name: str, rules: PlanRules, layers: int) -> Decision:
    """The decision for the parameter `name` of a model with `layers` layers."""
    for pattern in _NEVER:
        if fnmatchcase(name, pattern):
            return Decision(name, Format.BF16, f"never: {pattern}")
    for pattern in rules.keep_bf16:
        if _matches(name, pattern):
            return Decision(name, Format.BF16, f"keep_bf16: {pattern}")
    layer = layer_of(name)
    if layer is not None and layer < rules.first_layers_bf16:
        return Decision(name, Format.BF16, f"first_layers_bf16={rules.first_layers_bf16}")
    if layer is not None and layer >= layers - rules.last_layers_bf16:
        return Decision(name, Format.BF16, f"last_layers_bf16={rules.last_layers_bf16}")
    if layer is not None and name.endswith(_LINEAR_SUFFIXES):
        return Decision(name, rules.linear, "linear")
    raise PrecisionPlanError(f"no precision rule covers the parameter {name!r}")


def layer_of(name: str) -> int | None:
    """The layer number in a Hugging Face parameter name, or None outside the layers."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else None


def _matches(name: str, pattern: str) -> bool:
    """Whole-name match; the trailing `.weight` may be left out. `*` and `?` as in a shell."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.removesuffix(".weight"), pattern)


def make_plan(rules: PlanRules, dims: ModelDims) -> dict[str, Decision]:
    """Decisions for every parameter of the model, by Hugging Face name.

    Raises PrecisionPlanError for a pattern that matches nothing, and where projections that both
    engines hold fused (q, k, v; gate, up) would need different formats.
    """
    table = name_table(dims)
    names = [name for slot in table for name in slot.hf]
    for pattern in rules.keep_bf16:
        if not any(_matches(name, pattern) for name in names):
            raise PrecisionPlanError(
                f"keep_bf16: {pattern!r} matches no parameter; names look like {names[2]!r}"
            )
    plan = {name: decide(name, rules, dims.layers) for name in names}
    for slot in table:
        formats = {plan[name].format for name in slot.hf}
        if len(formats) > 1:
            raise PrecisionPlanError(
                f"{', '.join(slot.hf)} are one fused layer in both engines and need one format; "
                "name all of them in keep_bf16, or none"
            )
    return plan


def assert_effective(plan: dict[str, Decision], effective: dict[str, Format], *, where: str) -> None:
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


def count_formats(formats: Iterable[str]) -> str:
    """How many parameters are in each format, as text: "28 fp8_block, 10 bf16"."""
    counts = Counter(formats)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


# What a product of each dtype is called here. Keyed by text, so that torch is not imported.
FORMAT_OF_DTYPE = {"torch.bfloat16": Format.BF16, "torch.float32": Format.FP32}
