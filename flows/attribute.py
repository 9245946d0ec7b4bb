"""`fp8rl attribute`: which layers and kinds of linears FP8 makes the mismatch, and what BF16 buys."""

import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from flows.measuring_view import MeasuringView
from flows.terminal import say
from fp8rl.device import compute_environment
from fp8rl.files import write_atomic
from fp8rl.layerwise.attribution_recipe import measured_recipe
from fp8rl.parity_report import plain
from fp8rl.recipe.load import LoadedRecipe
from fp8rl.recipe.precision import Linear

if TYPE_CHECKING:
    from fp8rl.layerwise.attribution import Attribution, Effect, Fall
    from fp8rl.layerwise.attribution_report import Report
    from fp8rl.layerwise.confirmation import Agreement, Confirmation

FOLDER = "attribute"
# What vLLM and torch warn of is meant to be so.
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def attribute(
    loaded: LoadedRecipe,
    console: Console,
    *,
    weights: Path | None = None,
    keep: int,
    budget: float,
    out: Path | None = None,
) -> None:
    """Measures, prints, and writes attribution.json and .png to `out`.

    weights: a Hugging Face folder to take instead of the recipe's model. keep, budget: as many units,
    and so large a share of the FP8 elements, are suggested at most. out: runs/attribute/<arm> where
    None. Raises RecipeError as `measured_recipe` and `report_of`.
    """
    recipe = measured_recipe(loaded.recipe, weights=weights)
    # Before torch is imported, which reads it.
    os.environ.update(compute_environment(recipe) | _QUIET)
    name = recipe.arm or "recipe"
    with MeasuringView(console, f"Attribution of {loaded.path}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fp8rl.layerwise.attribution_report import figures, plot, report_of

        report = report_of(recipe, weights=weights, most=keep, budget=budget)
    where = out or Path(recipe.runs_dir).resolve() / FOLDER / name
    head = {"recipe": str(loaded.path), "arm": recipe.arm, "keep": keep, "budget": budget}
    values = plain(head | figures(report))
    write_atomic(where / "attribution.json", json.dumps(values, indent=1, allow_nan=False).encode())
    title = f"What FP8 linears add to the mismatch: {Path(report.weights).name}, {report.tokens} tokens"
    plot(report, where / "attribution.png", title)

    if loaded.recipe.precision.kv_cache is Linear.FP8:
        say("The recipe's FP8 KV cache is left out: this is on linears.")
    _say_basis(report)
    console.print(_units_table(report.attribution))
    console.print(_steps_table(report.attribution))
    _say_suggestion(report)
    say(f"All figures: {where / 'attribution.json'}; as a picture: {where / 'attribution.png'}")


def _effect(effect: "Effect") -> tuple[str, str]:
    return f"{effect.error:.4f}", f"{effect.kl_k3:.3g}"


def _fall(fall: "Fall") -> str:
    return f"{fall.value:+.2g} ({fall.low:+.2g} to {fall.high:+.2g})"


def _agreement(one: "Agreement") -> str:
    if one.differ == 0:
        return f"all {one.tokens} log-probs equal to the last bit"
    return f"{one.differ} of {one.tokens} log-probs differ, by up to {one.largest:.2g}"


def _say_basis(report: "Report") -> None:
    found = report.attribution
    error, kl = _effect(found.all_fp8)
    say(f"{report.weights}: {report.sequences} answers, {report.tokens} tokens, at temperature 1")
    say(f"Learner in FP8 and engine: {_agreement(report.stand_in)}.")
    say(f"BF16 learner with FP8 on all linears: mismatch {error}, kl_k3 {kl}.")
    say(f"Floor, BF16 with BF16 that rounds once otherwise: kl_k3 {found.floor:.3g}.")
    say(f"Noise, what another rounding does to FP8 on all: kl_k3 up to {found.noise:.3g}.")


def _units_table(found: "Attribution") -> Table:
    table = Table(title="Units, by what keeping each in BF16 buys", title_justify="left")
    for heading in (
        "unit",
        "alone: mismatch",
        "kl_k3",
        "over the floor",
        "left out: mismatch",
        "kl_k3",
    ):
        table.add_column(heading, justify="right" if table.columns else "left")
    table.add_column("fall of kl_k3 (95%)", justify="right", no_wrap=True)
    for heading in ("of the products", "BF16 costs, MB"):
        table.add_column(heading, justify="right")
    for row in found.rows:
        table.add_row(
            row.unit.name,
            *_effect(row.alone),
            f"{row.alone.kl_k3 - found.floor:+.2g}",
            *_effect(row.left_out),
            _fall(row.fall),
            f"{row.unit.share:.1%}",
            f"{found.units.bytes_more([row.unit]) / 1e6:.2f}",
        )
    return table


def _steps_table(found: "Attribution") -> Table:
    table = Table(title="Kept in BF16 together, predicted", title_justify="left")
    for heading in ("with", "mismatch", "kl_k3", "fall since taken (95%)", "taken", "of the products"):
        table.add_column(heading, justify="right" if table.columns else "left")
    kept = []
    for step in found.steps:
        kept.append(step.unit)
        taken, share = "yes" if step.taken else "no", f"{found.units.share(kept):.1%}"
        cells = (*_effect(step.effect), _fall(step.fall), taken, share)
        table.add_row(f"+ {step.unit.name}", *cells)
    return table


def _say_suggestion(report: "Report") -> None:
    done = report.confirmation
    if done is None:
        say("Nothing fits into the budget: nothing is suggested. Raise --budget")
        return
    names = ", ".join(unit.name for unit in report.kept)
    if report.attribution.suggestion:
        say(f"Suggestion: {names} in BF16. Run with '{report.override}'")
    else:
        say("No choice within --keep and --budget lowers the mismatch beyond the noise: nothing is")
        say(f"suggested. Confirmed is the best that was found, {names}: '{report.override}'")
    _say_confirmation(done)


def _say_confirmation(done: "Confirmation") -> None:
    say(f"In the engine, against the prediction: {_agreement(done.agreement)}.")
    for what, on in (("the same tokens", done.chosen_on), ("tokens not chosen on", done.held_out)):
        (error, kl), (error_kept, kl_kept) = _effect(on.all_fp8), _effect(on.kept)
        say(
            f"  {what}: mismatch {error} -> {error_kept}, kl_k3 {kl} -> {kl_kept}, "
            f"fall {_fall(on.fall)}"
        )
    before, after = done.bytes
    say(f"  published weights: {before / 1e6:.1f} -> {after / 1e6:.1f} MB")
    low, high = min(done.speeds), max(done.speeds)
    say(
        f"  decoding: {done.speed:.2f} of the tokens/s of all FP8, {low:.2f} to {high:.2f} in "
        f"{len(done.speeds)} rounds. On a CPU, where FP8 is emulated: it says nothing about a GPU."
    )
