"""The parity report of a model: whose weights, the verdict in words, and the picture."""

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8rl import machine
from fp8rl.model.dims import ModelDims, read_dims
from fp8rl.model.precision import PrecisionPlanError, make_plan
from fp8rl.model.source import model_dims, model_folder
from fp8rl.numerics.engine_rules import EngineRule, Operand
from fp8rl.numerics.parity import (
    ACTIVATIONS_FROM,
    Agreement,
    ParityReport,
    TensorError,
    make_report,
)
from fp8rl.numerics.quantise import NonFiniteError
from fp8rl.recipe.load import LoadedRecipe
from fp8rl.recipe.precision import Linear
from fp8rl.recipe.rules import RecipeError, plan_rules, require_one_model, require_valid
from fp8rl.recipe.schema import Recipe


@dataclass(frozen=True)
class ModelReport:
    """report: the figures. head: what they are of, and the verdict, for the file. title: in words."""

    report: ParityReport
    head: dict[str, Any]
    title: str


def of_recipe(loaded: LoadedRecipe, *, weights: Path | None) -> ModelReport:
    """The report over the weights that the recipe puts in FP8.

    weights: a Hugging Face folder to take instead of the recipe's model. Raises RecipeError where the
    recipe is not valid, puts nothing in FP8, or its weights cannot be read or hold NaN or Inf.
    """
    recipe = loaded.recipe
    require_one_model(recipe)
    folder = weights.resolve() if weights is not None else model_folder(recipe)
    dims = model_dims(recipe) if weights is None else read_dims(weights)
    require_valid(recipe, dims)
    names = fp8_names(recipe, dims)
    tensors, source = load_weights(recipe, dims, folder)
    if weights is None and recipe.model.gguf is not None:
        source = recipe.model.gguf
    require_plain(tensors, names, source)
    try:
        report = make_report(tensors, names, dims)
    except NonFiniteError as error:
        raise RecipeError(f"{source}: {error}") from None
    head = {
        "recipe": str(loaded.path),
        "arm": recipe.arm,
        "weights": source,
        "tensors": len(names),
        "elements": sum(tensors[name].numel() for name in names),
        "recipe_scaling": recipe.precision.scaling,
        "machine": machine.describe(),
        "verdict": verdict(report),
    }
    what = Path(source).name if folder is not None else source
    return ModelReport(report, head, f"{len(names)} weights of {what}")


KINDS = ("q", "k", "v", "o", "gate", "up", "down")


# Rules part below this amax too, where 448 / amax overflows; no weight is that small.
NO_FLOOR = 1e-30


def fp8_names(recipe: Recipe, dims: ModelDims) -> list[str]:
    """Parameters that rollout or learner hold in FP8."""
    precision = recipe.precision
    sides = (precision.rollout, precision.learner)
    try:
        plans = [make_plan(plan_rules(precision, side), dims) for side in sides]
    except PrecisionPlanError as error:
        raise RecipeError(f"precision: {error}") from None
    names = [name for name in plans[0] if any(plan[name].format.is_fp8 for plan in plans)]
    if not names:
        raise RecipeError(
            "the recipe puts no weight in FP8: take another arm, or set precision.rollout=fp8"
        )
    return names


def load_weights(recipe: Recipe, dims: ModelDims, folder: Path | None) -> tuple[dict[str, Any], str]:
    """Weights by Hugging Face name, and what they are, in words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-core tells what else it could use
        from fp8rl.model.megatron import PolicyModel, WeightsError, read_hf_weights

        if folder is None:
            plan = make_plan(plan_rules(recipe.precision, Linear.BF16), dims)
            model = PolicyModel(dims, plan)
            model.reset(recipe.seed)
            return model.export(), f"the tiny model, random as it starts (seed {recipe.seed})"
    try:
        return read_hf_weights(folder, dims), str(folder)
    except WeightsError as error:
        raise RecipeError(str(error)) from None


def require_plain(weights: dict[str, Any], names: list[str], source: str) -> None:
    missing = [name for name in (*names, *ACTIVATIONS_FROM) if name not in weights]
    if missing:
        raise RecipeError(f"{source}: no tensor {missing[0]} ({len(missing)} are missing)")
    if any(weights[name].element_size() < 2 for name in names):
        raise RecipeError(
            f"{source}: its weights are quantised already; name the folder they come from"
        )


def verdict(report: ParityReport) -> list[str]:
    """Which scales make rules provably equal to ours, by what was tried, and why."""
    equal: dict[bool, list[str]] = {False: [], True: []}
    apart: dict[bool, list[str]] = {False: [], True: []}
    for rule, one in report.equality:
        if one.equal_from is None:
            share = f"{rule.engine} {1 - one.fp32_share:.0%} (up to {one.most_ulps} ulp)"
            apart[rule.pow2].append(share)
        else:
            floor = "" if one.equal_from < NO_FLOOR else f" (amax from {one.equal_from:.1e})"
            equal[rule.pow2].append(rule.engine + floor)

    def listed(names: list[str]) -> str:
        return "; ".join(dict.fromkeys(names)) or "none"

    beside = [count for _, one in report.equality for count in one.beside_powers.values()]
    lines = [
        f"Power-of-two scales: scales, codes and values equal ours for every BF16 amax: "
        f"{listed(equal[True])}.",
        "  Why: ours keeps the power of two at or below 448 / amax, the others take the one at or "
        "above amax / 448. The float after 448 * 2^k lies too far from it for either quotient to "
        "round onto 2^k, so both are the same power. Products with it are exact: the casts see the "
        "same numbers.",
        "  Except: where an engine's floor or padding makes amax another one (blocks of zeros among "
        f"them: values 0 on both sides); and for up to {max(beside, default=0)} FP32 numbers just "
        "above 448 * 2^k, none of them BF16, whose FP32 logarithm rounds to k: the scale is half of "
        "ours.",
        f"FP32 scales: scales and codes equal ours for every BF16 amax: {listed(equal[False])}.",
        f"  Apart, factor or descale, in a share of all FP32 amax: {listed(apart[False])}.",
        "  Why: ours rounds 448 / amax and then its reciprocal, as Transformer Engine does. A rule "
        "that rounds amax / 448, or multiplies by a rounded reciprocal, ends an ulp or two beside it, "
        "and some products then fall on the other side of a rounding boundary.",
    ]
    if apart[True]:
        lines.insert(1, f"  Apart: {listed(apart[True])}.")
    return lines


def plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become text."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_COLOURS = {"fp32": "tab:blue", "pow2": "tab:orange"}


_LABELS = {"fp32": "FP32 scales", "pow2": "power-of-two scales"}


def plot(report: ParityReport, path: Path, title: str) -> None:
    """Error by layer for each kind of projection; differences of scales and codes by rule. PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = [kind for kind in KINDS if of_kind(report.errors, kind)]
    figure = plt.figure(figsize=(11, 7))
    figure.suptitle(f"Our block-wise FP8 beside other engines' rules: {title}", fontsize=12, y=0.985)
    upper = figure.add_gridspec(1, len(kinds), left=0.07, right=0.98, top=0.85, bottom=0.6, wspace=0.1)
    axes = upper.subplots(sharey=True, squeeze=False)[0]
    for axis, kind in zip(axes, kinds, strict=True):
        _plot_errors(axis, of_kind(report.errors, kind), kind)
    axes[0].set_ylabel("relative error, %")
    low, high = axes[0].get_ylim()
    spare = max(0.0, 0.1 - (high - low)) / 2  # differences of a thousandth are not to look large
    axes[0].set_ylim(low - spare, high + spare)
    figure.legend(
        *axes[0].get_legend_handles_labels(), ncols=2, loc="upper center", bbox_to_anchor=(0.5, 0.955)
    )
    lower = figure.add_gridspec(1, 2, left=0.28, right=0.98, top=0.46, bottom=0.05, wspace=0.07)
    left, right = lower.subplots(sharey=True)
    _plot_rules(left, right, report.agreement)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _plot_errors(axis: Any, errors: list[TensorError], kind: str) -> None:
    for mode, colour in _COLOURS.items():
        points = [(error.layer, 100 * error.errors[mode].frobenius) for error in errors]
        mark = "." if len(points) < 15 else None
        axis.plot(*zip(*points, strict=True), color=colour, label=_LABELS[mode], marker=mark)
    axis.set_title(kind)
    axis.set_xlabel("layer")
    axis.locator_params(axis="x", integer=True, nbins=3)
    axis.tick_params(axis="y", length=0)
    axis.grid(alpha=0.3)


def _plot_rules(left: Any, right: Any, agreement: list[tuple[EngineRule, Agreement]]) -> None:
    labels = list(dict.fromkeys(_label(rule) for rule, _ in agreement))
    for rule, one in agreement:
        mode = "pow2" if rule.pow2 else "fp32"
        place = labels.index(_label(rule)) + (0.2 if rule.pow2 else -0.2)
        blocks = max(one.blocks, 1)
        further, differ = one.scales_further / blocks, 1 - one.scales_equal / blocks
        codes = 1e6 * one.codes_differ / max(one.elements, 1)
        left.barh(place, 100 * differ, 0.36, color=_COLOURS[mode])
        left.barh(place, 100 * further, 0.36, color="black", alpha=0.5)
        right.barh(place, codes, 0.36, color=_COLOURS[mode])
        for axis, value in ((left, 100 * differ), (right, codes)):
            text = f"{value:,.0f}" if value == 0 or value >= 1 else f"{value:.1g}"
            shift = {"xytext": (3, 0), "textcoords": "offset points"}
            axis.annotate(text, (value, place), **shift, va="center", fontsize=8, color=_COLOURS[mode])
    left.set_yticks(range(len(labels)), labels)
    left.set_ylim(len(labels) - 0.5, -0.5)
    left.set_title("scales that differ, % of blocks (dark: by over 1 ulp)", fontsize=10)
    right.set_title("codes that differ, per million", fontsize=10)
    for axis in (left, right):
        axis.margins(x=0.12)
        axis.tick_params(axis="y", length=0)
        axis.grid(alpha=0.3, axis="x")


def _label(rule: EngineRule) -> str:
    engine = rule.engine.replace("Transformer Engine", "TE")
    return engine + (" (activations)" if rule.operand is Operand.ACTIVATIONS else "")


def of_kind(errors: list[TensorError], kind: str) -> list[TensorError]:
    return [error for error in errors if error.kind == kind]


def mode_name(rule: EngineRule) -> str:
    return "power of two" if rule.pow2 else "FP32"


def share(value: float) -> str:
    """A share that never rounds to nothing or to all unless it is."""
    if value in (0.0, 1.0):
        return f"{value:.0%}"
    return f"{value:.1%}" if 0.001 <= value <= 0.999 else f"{value:.1e}" if value < 0.5 else ">99.9%"
