"""`fp8rl numerics`: our block scaling beside other engines' rules, and what it costs a model."""

import json
import math
import statistics
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fp8rl import machine
from fp8rl.journal import write_atomic
from fp8rl.model.dims import ModelDims, read_dims
from fp8rl.model.precision import PrecisionPlanError, make_plan
from fp8rl.model.source import model_dims, model_folder
from fp8rl.numerics.engine_rules import EngineRule, Operand
from fp8rl.numerics.formats import Scaling
from fp8rl.numerics.parity import (
    ACTIVATIONS_FROM,
    Agreement,
    ParityReport,
    Probe,
    TensorError,
    make_report,
)
from fp8rl.numerics.quantise import NonFiniteError
from fp8rl.recipe.load import LoadedRecipe
from fp8rl.recipe.rules import RecipeError, plan_rules
from fp8rl.recipe.schema import Linear, Recipe

FOLDER = "numerics"
KINDS = ("q", "k", "v", "o", "gate", "up", "down")
_WORST = 6
# Rules part below this amax too, where 448 / amax overflows; no weight is that small.
_NO_FLOOR = 1e-30


def numerics(
    loaded: LoadedRecipe, console: Console, *, weights: Path | None = None, out: Path | None = None
) -> None:
    """Makes the report over the weights that the recipe puts in FP8, prints it and writes it to `out`.

    weights: a Hugging Face folder to take instead of the recipe's model. out: runs/numerics/<arm>
    where None. Raises RecipeError where there is nothing in FP8 or the weights cannot be read.
    """
    recipe = loaded.recipe
    folder = weights.resolve() if weights is not None else model_folder(recipe)
    dims = model_dims(recipe) if weights is None else read_dims(weights)
    names = _fp8_names(recipe, dims)
    tensors, source = _weights(recipe, dims, folder)
    if weights is None and recipe.model.gguf is not None:
        source = recipe.model.gguf
    _require_plain(tensors, names, source)
    try:
        report = make_report(tensors, names, dims)
    except NonFiniteError as error:
        raise RecipeError(f"{source}: {error}") from None
    said = verdict(report)
    head = {
        "recipe": str(loaded.path),
        "arm": recipe.arm,
        "weights": source,
        "tensors": len(names),
        "elements": sum(tensors[name].numel() for name in names),
        "recipe_scaling": recipe.precision.scaling,
        "machine": machine.describe(),
        "verdict": said,
    }
    where = out or Path(recipe.runs_dir).resolve() / FOLDER / (recipe.arm or "recipe")
    figures = _plain(head | report.to_json())
    write_atomic(where / "numerics.json", json.dumps(figures, indent=1, allow_nan=False).encode())
    if recipe.precision.scaling is not Scaling.BLOCK:
        _say(console, f"The recipe scales by {recipe.precision.scaling}; this report is on blocks.")
    what = Path(source).name if folder is not None else source
    plot(report, where / "numerics.png", f"{len(names)} weights of {what}")

    _say(console, f"{len(names)} weights ({head['elements']:,} values) of {source}")
    console.print(_agreement_table(report))
    for line in said:
        console.print(line, markup=False, highlight=False)
    for table in (_probe_table(report), _kinds_table(report.errors), _worst_table(report.errors)):
        console.print(table)
    _say(console, f"All figures: {where / 'numerics.json'}; as a picture: {where / 'numerics.png'}")


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, markup=False, highlight=False)


def _fp8_names(recipe: Recipe, dims: ModelDims) -> list[str]:
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


def _weights(recipe: Recipe, dims: ModelDims, folder: Path | None) -> tuple[dict[str, Any], str]:
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


def _require_plain(weights: dict[str, Any], names: list[str], source: str) -> None:
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
            floor = "" if one.equal_from < _NO_FLOOR else f" (amax from {one.equal_from:.1e})"
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


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become text."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _mode(rule: EngineRule) -> str:
    return "power of two" if rule.pow2 else "FP32"


def _share(value: float) -> str:
    """A share that never rounds to nothing or to all unless it is."""
    if value in (0.0, 1.0):
        return f"{value:.0%}"
    return f"{value:.1%}" if 0.001 <= value <= 0.999 else f"{value:.1e}" if value < 0.5 else ">99.9%"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for n, column in enumerate(columns):
        table.add_column(column, justify="right" if n else "left")
    return table


def _agreement_table(report: ParityReport) -> Table:
    table = _table(
        "Our 128 x 128 block rule beside other engines'",
        *("rule", "scales", "equal", "1 ulp", "further", "codes differ", "values", "proven from amax"),
    )
    equality = {(rule.name, rule.operand, rule.pow2): one for rule, one in report.equality}
    for rule, one in report.agreement:
        blocks = max(one.blocks, 1)
        equal_from = equality[rule.name, rule.operand, rule.pow2].equal_from
        if equal_from is None:
            proven = "none"
        else:
            proven = "any" if equal_from < _NO_FLOOR else f"{equal_from:.1e}"
        table.add_row(
            rule.engine + (" (activations)" if rule.operand is Operand.ACTIVATIONS else ""),
            _mode(rule),
            *(_share(n / blocks) for n in (one.scales_equal, one.scales_one_ulp, one.scales_further)),
            _share(one.codes_differ / max(one.elements, 1)),
            "equal" if one.values_equal else "differ",
            proven,
        )
    return table


def _cell(one: Probe) -> str:
    parts = []
    ratio = one.descale / one.our_descale
    if ratio != 1:
        parts.append("scale by ulps" if abs(ratio - 1) < 1e-5 else f"scale x{ratio:.2g}")
    if one.codes_nan:
        parts.append("NaN codes")
    elif one.codes_differ_share:
        parts.append(f"{one.codes_differ_share:.0%} of codes")
        lost = f"error {one.error:.0%}" if one.error > 2 * one.our_error else ""
        parts.append("same values" if one.values_equal else lost)
    return ", ".join(filter(None, parts)) or "="


def _probe_table(report: ParityReport) -> Table:
    blocks = [one.block for one in report.probes[0][1]]
    table = _table("Blocks where rules part ( = : as ours)", "rule", "scales", *blocks)
    same = []
    for rule, probes in report.probes:
        cells = [_cell(one) for one in probes]
        if set(cells) == {"="}:
            same.append(f"{rule.engine} ({_mode(rule)})")
        else:
            table.add_row(rule.engine, _mode(rule), *cells)
    table.caption = "As ours everywhere: " + ", ".join(dict.fromkeys(same))
    table.caption_justify = "left"
    return table


def _of_kind(errors: list[TensorError], kind: str) -> list[TensorError]:
    return [error for error in errors if error.kind == kind]


def _kinds_table(errors: list[TensorError]) -> Table:
    table = _table(
        "What quantisation loses, FP32 / power-of-two scales",
        *("projection", "weights", "relative error", "worst layer", "largest / amax"),
        *("become zero", "at largest code"),
    )
    for kind in KINDS:
        of_kind = _of_kind(errors, kind)
        if not of_kind:
            continue

        def both(fmt: str, figure: str, reduce: Any, of: list[TensorError] = of_kind) -> str:
            values = (
                reduce(getattr(error.errors[mode], figure) for error in of) for mode in ("fp32", "pow2")
            )
            return " / ".join(fmt.format(value) for value in values)

        table.add_row(
            kind,
            str(len(of_kind)),
            both("{:.3%}", "frobenius", statistics.fmean),
            both("{:.3%}", "frobenius", max),
            both("{:.2%}", "largest", max),
            both("{:.1e}", "underflow", statistics.fmean),
            both("{:.1e}", "saturation", statistics.fmean),
        )
    return table


def _worst_table(errors: list[TensorError]) -> Table:
    table = _table(
        f"The {min(_WORST, len(errors))} weights that lose most, FP32 / power-of-two scales",
        *("weight", "shape", "relative error", "largest / amax", "become zero"),
    )
    worst = sorted(errors, key=lambda e: -max(one.frobenius for one in e.errors.values()))
    for error in worst[:_WORST]:
        fp32, pow2 = error.errors["fp32"], error.errors["pow2"]
        table.add_row(
            error.name,
            "{} x {}".format(*error.shape),
            f"{fp32.frobenius:.3%} / {pow2.frobenius:.3%}",
            f"{fp32.largest:.2%} / {pow2.largest:.2%}",
            f"{fp32.underflow:.1e} / {pow2.underflow:.1e}",
        )
    return table


_COLOURS = {"fp32": "tab:blue", "pow2": "tab:orange"}
_LABELS = {"fp32": "FP32 scales", "pow2": "power-of-two scales"}


def plot(report: ParityReport, path: Path, title: str) -> None:
    """Error by layer for each kind of projection; differences of scales and codes by rule. PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = [kind for kind in KINDS if _of_kind(report.errors, kind)]
    figure = plt.figure(figsize=(11, 7))
    figure.suptitle(f"Our block-wise FP8 beside other engines' rules: {title}", fontsize=12, y=0.985)
    upper = figure.add_gridspec(1, len(kinds), left=0.07, right=0.98, top=0.85, bottom=0.6, wspace=0.1)
    axes = upper.subplots(sharey=True, squeeze=False)[0]
    for axis, kind in zip(axes, kinds, strict=True):
        _plot_errors(axis, _of_kind(report.errors, kind), kind)
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
