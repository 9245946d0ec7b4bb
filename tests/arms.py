"""The arms of the tiny recipe, short: each run once in a session, by the real stack."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8rl.journal import Journal
from fp8rl.recipe.load import load_recipe
from fp8rl.recipe.schema import Recipe

TINY = Path(__file__).parents[1] / "configs" / "tiny"
# The demo's recipe with a shorter warm start: enough for a model that answers, seldom right.
# Two chunks to a rollout and some buckets to a sync, so that one can be half done.
SHORT = [
    *("iterations=3", "warm_start.steps=80", "evaluate.every=2", "task.val_prompts=32"),
    *("rollout.chunk_size=128", "sync.bucket_mib=1"),
]


@dataclass
class Run:
    recipe: Recipe
    summary: dict[str, Any]
    journal: Journal


class Arms:
    """Runs of the short recipe in `runs_dir`, by arm."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._done: dict[str, Run] = {}

    def __call__(self, arm: str) -> Run:
        if arm not in self._done:
            from flows.training import train

            overrides = [*SHORT, f"runs_dir={self._runs_dir}", f"name=test-{arm}"]
            recipe = load_recipe(TINY / f"{arm}.yaml", overrides).recipe
            summary = asyncio.run(train(recipe=recipe))
            self._done[arm] = Run(recipe, summary, Journal(self._runs_dir / f"test-{arm}"))
        return self._done[arm]
