"""`fp8rl parity`: engine and learner on the same tokens, at every point of every layer."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from flows.measuring_view import MeasuringView
from flows.terminal import say
from fp8rl.device import compute_environment, settled
from fp8rl.files import write_atomic
from fp8rl.model.dims import read_dims
from fp8rl.model.source import model_dims
from fp8rl.parity_report import plain
from fp8rl.recipe.load import LoadedRecipe
from fp8rl.recipe.rules import require_one_model, require_valid

if TYPE_CHECKING:
    from fp8rl.layerwise.parity_report import Mismatch, Report, Rounded

FOLDER = "parity"


def parity(
    loaded: LoadedRecipe,
    console: Console,
    *,
    weights: Path | None = None,
    sequences: int,
    out: Path | None = None,
) -> None:
    """Measures, prints, and writes parity.json and .png to `out`.

    weights: a Hugging Face folder to take instead of the recipe's model. sequences: compared inside, at
    most. out: runs/parity/<arm> where None. Raises RecipeError as `report_of`, and where the recipe is
    not valid.
    """
    require_one_model(loaded.recipe)
    dims = model_dims(loaded.recipe) if weights is None else read_dims(weights)
    require_valid(loaded.recipe, dims)
    recipe = settled(loaded.recipe)
    # Before torch is imported, which reads it. vLLM's warnings are about what is meant to be so.
    os.environ.update(compute_environment(recipe) | {"VLLM_LOGGING_LEVEL": "ERROR"})
    with MeasuringView(console, f"Parity of {loaded.path}"):
        from fp8rl.layerwise.parity_report import plot, report_of

        report = report_of(recipe, weights=weights, most=sequences)
    precision = recipe.precision
    asked: dict[str, str | bool]
    asked = {
        key: str(getattr(precision, key)) for key in ("rollout", "learner", "kv_cache", "learner_kv")
    }
    asked |= {
        "head": str(precision.head),
        "parity": precision.parity,
        "backend": str(precision.backend),
    }
    where = out or Path(recipe.runs_dir).resolve() / FOLDER / (recipe.arm or "recipe")
    values = plain(
        {"recipe": str(loaded.path), "arm": recipe.arm, "precision": asked} | report.to_json()
    )
    write_atomic(where / "parity.json", json.dumps(values, indent=1, allow_nan=False).encode())
    plot(report, where / "parity.png", f"Engine and learner of {loaded.path}")

    say(f"{report.weights}: {report.sequences} sequences of {report.tokens} tokens compared inside")
    say(", ".join(f"{key} {value}" for key, value in asked.items()))
    console.print(_mismatch_table(report))
    for side in report.sides:
        if any(one.differ for one in (*side.made, *side.grown)):
            console.print(_points_table(side))
        say(f"Learner, {side.name}:")
        for line in values["learner"][side.name]["verdict"]:
            say(f"  {line}")
    say(f"All figures: {where / 'parity.json'}; as a picture: {where / 'parity.png'}")


def _mismatch_table(report: "Report") -> Table:
    title = f"Mismatch of {report.sampled} sampled tokens with the engine's decoding"
    table = Table(title=title, title_justify="left")
    for heading in ("", "mismatch", "kl_k3", "log-probs equal to the last bit"):
        table.add_column(heading, justify="right" if heading else "left")

    def row(name: str, one: "Mismatch") -> None:
        table.add_row(name, f"{one.error:.5f}", f"{one.kl_k3:.2e}", f"{one.equal:.1%}")

    row("the engine's own prefill", report.prefill)
    for side in report.sides:
        row(f"learner, {side.name}", side.mismatch)
    for name, (alone, _) in report.points.items():
        row(f"  as Megatron-core, but {name} as the engine", alone)
    for name, (_, without) in report.points.items():
        row(f"  as the engine, but {name} as Megatron-core", without)
    return table


def _points_table(side: "Rounded") -> Table:
    from fp8rl.layerwise.compare import summary

    table = Table(title=f"Learner, {side.name}", title_justify="left")
    for heading in ("point", "elements made to differ", "at most", "relative"):
        table.add_column(heading, justify="right" if table.columns else "left")
    for heading in ("on its own: first layer", "last layer"):
        table.add_column(heading, justify="right")
    for row in summary(side.made, side.grown):
        cells = (row.made_relative, row.grown_first, row.grown_last)
        shares = (f"{row.made_share:.2%}", f"{row.made_most:.2%}")
        table.add_row(row.point, *shares, *(f"{value:.1e}" if value else "0" for value in cells))
    return table
