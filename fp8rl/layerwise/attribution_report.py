"""An attribution of a recipe: all of it, its figures for a file, and its picture."""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fp8rl import machine
from fp8rl.layerwise.attribution import Attribution, Effect, Fall, Measure, Row, attribute
from fp8rl.layerwise.confirmation import Agreement, Confirmation, OnTokens, confirm
from fp8rl.layerwise.setup import Setup, batch_of, engine_logprobs, trained_model
from fp8rl.layerwise.units import Unit, exclude_override, units_of
from fp8rl.recipe.rules import rollout_fp8
from fp8rl.recipe.schema import Recipe


@dataclass(frozen=True)
class Report:
    """stand_in: of the learner in FP8 with the engine, on the tokens of the attribution. kept: the
    units that were confirmed in the engine: the suggestion or, where there is none, all that were
    chosen. override: what keeps them in BF16. sequences, tokens: what was measured on.
    """

    weights: str
    sequences: int
    tokens: int
    stand_in: Agreement
    attribution: Attribution
    kept: Sequence[Unit]
    override: str
    confirmation: Confirmation | None


def report_of(recipe: Recipe, *, weights: Path | None, most: int, budget: float) -> Report:
    """Attributes the mismatch of `recipe`, which is one of `measured_recipe`, and confirms what is
    suggested in the engine.

    weights: a Hugging Face folder to take instead of the recipe's model. most, budget: of units and of
    FP8 elements to keep in BF16; see `choose`. Raises RecipeError as `trained_model` and `Setup`.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model_dir = trained_model(recipe, folder / "model", weights=weights)
        setup = Setup(recipe, model_dir, folder)
        requests = setup.requests_of(1)
        batch = batch_of(requests, setup.engine.generate(requests, version=0))
        measure = Measure(setup.learner, batch)
        scheme = rollout_fp8(recipe.precision).weight
        units = units_of(setup.engine.plan, setup.learner.dims, scheme)
        in_engine = engine_logprobs(setup.engine, batch)
        stand_in = Agreement.of(in_engine, measure.logprobs(units.plan), batch)
        found = attribute(units, measure, most=most, budget=budget)
        kept = found.suggestion or [step.unit for step in found.steps]
        confirmed = None
        if kept:
            confirmed = confirm(setup, units, kept, measure, measure.effect(in_engine))
        return Report(
            _name(recipe, weights),
            len(batch.lengths),
            int(batch.mask.sum()),
            stand_in,
            found,
            kept,
            exclude_override(recipe.precision.exclude, kept),
            confirmed,
        )


def _name(recipe: Recipe, weights: Path | None) -> str:
    model = recipe.model
    if weights is not None:
        return str(weights)
    return model.gguf or model.hub or model.path or "the warm-started tiny model"


def figures(report: Report) -> dict[str, Any]:
    """All of it as plain values."""
    found, units = report.attribution, report.attribution.units
    return {
        "weights": report.weights,
        "sequences": report.sequences,
        "tokens": report.tokens,
        "stand_in": asdict(report.stand_in),
        "all_fp8": found.all_fp8.plain,
        "floor_kl_k3": found.floor,
        "floors": {point: effect.plain for point, effect in found.floors.items()},
        "noise_kl_k3": found.noise,
        "shaken": {point: effect.plain for point, effect in found.shaken.items()},
        "units": [
            {
                "unit": row.unit.name,
                "alone": row.alone.plain,
                "left_out": row.left_out.plain,
                "fall": asdict(row.fall),
                "share": row.unit.share,
                "bytes_more": units.bytes_more([row.unit]),
            }
            for row in found.rows
        ],
        "steps": [
            {
                "unit": step.unit.name,
                "kept": step.effect.plain,
                "fall": asdict(step.fall),
                "taken": step.taken,
            }
            for step in found.steps
        ],
        "suggestion": [unit.name for unit in found.suggestion],
        "kept": {
            "units": [unit.name for unit in report.kept],
            "override": report.override,
            "share": units.share(report.kept),
            "bytes_more": units.bytes_more(report.kept),
        },
        "confirmation": None if report.confirmation is None else _confirmed(report.confirmation),
        "machine": machine.describe(),
    }


def _confirmed(one: Confirmation) -> dict[str, Any]:
    def plain(on: OnTokens) -> dict[str, Any]:
        return {"all_fp8": on.all_fp8.plain, "kept": on.kept.plain, "fall": asdict(on.fall)}

    return {
        "chosen_on": plain(one.chosen_on),
        "held_out": plain(one.held_out),
        "stand_in": asdict(one.agreement),
        "published_bytes": {"all_fp8": one.bytes[0], "kept": one.bytes[1]},
        "tokens_per_sec_kept_over_all_fp8": {"median": one.speed, "rounds": one.speeds},
    }


_FALL, _ALONE, _CHANCE = "tab:green", "tab:blue", "grey"


def plot(report: Report, path: Path, title: str) -> None:
    """Fall of kl_k3 with each unit in BF16, and kl_k3 with FP8 on it alone: layers and kinds. PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = report.attribution
    layers = sorted((row for row in found.rows if row.unit.is_layer), key=_number)
    kinds = [row for row in found.rows if not row.unit.is_layer]
    figure, axes = plt.subplots(
        2, 2, figsize=(11, 7), width_ratios=(4, 1.3), sharey="row", layout="constrained", squeeze=False
    )
    figure.suptitle(title, fontsize=12)
    for column, rows in enumerate((layers, kinds)):
        names = [row.unit.name.removeprefix("layer ") for row in rows]
        _plot_falls(axes[0, column], names, [row.fall for row in rows], found)
        _plot_alone(axes[1, column], names, [row.alone for row in rows], found)
    for row, what in enumerate(("fall of kl_k3, kept in BF16", "kl_k3, FP8 on it alone")):
        axes[row, 0].set_ylabel(f"{what} (nats a token)")
        axes[row, 0].legend(loc="upper right", fontsize=8)
    for column, what in enumerate(("layer", "kind of linear")):
        axes[1, column].set_xlabel(what)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _number(row: Row) -> int:
    return int(row.unit.name.removeprefix("layer "))


def _plot_falls(axis: Any, names: Sequence[str], falls: Sequence[Fall], found: Attribution) -> None:
    values = [fall.value for fall in falls]
    errors = ([f.value - f.low for f in falls], [f.high - f.value for f in falls])
    axis.bar(names, values, color=_FALL, alpha=0.7)
    axis.errorbar(
        names, values, yerr=errors, fmt="none", ecolor="black", elinewidth=0.8, label="95%, sequences"
    )
    axis.axhspan(
        -found.noise, found.noise, color=_CHANCE, alpha=0.25, label="what another rounding does to it"
    )
    _tidy(axis, names)


def _plot_alone(axis: Any, names: Sequence[str], effects: Sequence[Effect], found: Attribution) -> None:
    axis.bar(names, [effect.kl_k3 for effect in effects], color=_ALONE, alpha=0.7)
    axis.axhline(found.floor, color="black", lw=1, ls="--", label="BF16 with another rounding")
    axis.axhline(found.all_fp8.kl_k3, color="tab:red", lw=1, label="FP8 on all")
    _tidy(axis, names)


def _tidy(axis: Any, names: Sequence[str]) -> None:
    axis.tick_params(axis="x", labelsize=8 if len(names) < 40 else 6, length=0)
    axis.margins(x=0.01)
    axis.grid(alpha=0.3, axis="y")
