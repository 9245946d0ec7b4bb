"""Which checkpoints and weights of a run stay. Read from the disk each time, so no restart loses it."""

from typing import Any

from fp8rl import checkpoints
from fp8rl.runs import Run

# Published weights whose tensors are kept.
KEPT_VERSIONS = 2


def metric_values(run: Run, name: str) -> dict[int, float]:
    """The metric `name` of each whole iteration that has it."""
    records = run.journal.iterations()
    return {record.iteration: record.metrics[name] for record in records if name in record.metrics}


def best(run: Run) -> dict[str, Any]:
    """The best iteration so far by the recipe's metric: {"metric", "iteration", "value"}."""
    options = run.recipe.checkpoint
    values = metric_values(run, options.metric)
    if not values:
        return {"metric": options.metric, "iteration": None, "value": None}
    value = (max if options.mode == "max" else min)(values.values())
    return {
        "metric": options.metric,
        "iteration": max(n for n, v in values.items() if v == value),
        "value": value,
    }


def old_checkpoints(run: Run) -> list[int]:
    """Versions whose checkpoints the recipe lets go. A fork keeps the one that it began with."""
    options = run.recipe.checkpoint
    return checkpoints.to_drop(
        checkpoints.listing(run.folder),
        keep_last=options.keep_last,
        keep_best=options.keep_best,
        metric=metric_values(run, options.metric),
        mode=options.mode.value,
        keep={run.origin} if run.origin else set(),
    )
