"""`fp8rl demo`: two precision arms of the tiny recipe, side by side."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8rl.comparison.gather import series_of
from fp8rl.comparison.plots import MAIN, panels, plot_curves
from fp8rl.files import write_atomic
from fp8rl.journal import Journal
from fp8rl.recipe.load import load_recipe
from fp8rl.recipe.schema import Recipe

ARMS = ("fp8-e2e-kv", "bf16")
CONFIGS = Path(__file__).parent.parent / "configs" / "tiny"


def demo_recipes(overrides: list[str], stamp: str) -> dict[str, Recipe]:
    """The demo's recipes by arm, each with a run name of its own."""
    return {
        arm: load_recipe(CONFIGS / f"{arm}.yaml", [*overrides, f"name=demo-{stamp}-{arm}"]).recipe
        for arm in ARMS
    }


def run_demo(
    recipes: dict[str, Recipe], run: Callable[[Recipe], dict[str, Any]]
) -> tuple[dict[str, Any], Path]:
    """Runs each recipe with `run`; returns the summaries by arm and the folder of the results.

    Writes summary.json and arms.png into runs/demo.
    """
    arms = {arm: run(recipe) for arm, recipe in recipes.items()}
    first = next(iter(recipes.values()))
    runs = Path(first.runs_dir).resolve()
    folder = runs / "demo"
    write_atomic(folder / "summary.json", json.dumps(arms, indent=1).encode())
    series = {
        arm: [series_of(Journal(runs / summary["run"]).iterations())] for arm, summary in arms.items()
    }
    write_atomic(folder / "arms.png", plot_curves(panels(series, MAIN)))
    return arms, folder
