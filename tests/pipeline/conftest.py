"""Real runs of the whole stack, made once and looked at by many tests."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fp8rl.journal import Journal
from fp8rl.recipe.load import load_recipe
from fp8rl.recipe.schema import Recipe

TINY = Path(__file__).parents[2] / "configs" / "tiny"
# The demo's recipe with a shorter warm start: enough for a model that answers, seldom right.
# Two chunks to a rollout, so that one can be half done.
SHORT = [
    *("iterations=3", "warm_start.steps=80", "evaluate.every=2", "task.val_prompts=32"),
    "rollout.chunk_size=128",
]


@dataclass
class Run:
    recipe: Recipe
    summary: dict[str, Any]
    journal: Journal


@pytest.fixture(scope="session")
def run_arm(runs_dir):
    """Runs an arm of the short recipe, once a session."""
    done: dict[str, Run] = {}

    def run(arm: str) -> Run:
        if arm not in done:
            from flows.training import train

            overrides = [*SHORT, f"runs_dir={runs_dir}", f"name=test-{arm}"]
            recipe = load_recipe(TINY / f"{arm}.yaml", overrides).recipe
            summary = asyncio.run(train(recipe))
            done[arm] = Run(recipe, summary, Journal(runs_dir / f"test-{arm}"))
        return done[arm]

    yield run
    import ray

    ray.shutdown()
