"""A training run: prepare, then iterations, with one MLflow run from beginning to end."""

import os
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import (
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from flows.iteration import first_weights, iteration
from fp8rl import machine, progress
from fp8rl.context import RunContext
from fp8rl.device import compute_environment, resolve, settled
from fp8rl.journal import Journal, process_start
from fp8rl.model.precision import both_sides, count_formats
from fp8rl.model.source import describe_model, model_folder
from fp8rl.preflight import require_runnable
from fp8rl.recipe.load import check_name, to_yaml
from fp8rl.recipe.rules import warnings
from fp8rl.recipe.schema import Recipe
from fp8rl.report import summarise
from fp8rl.tracking import Tracker
from tasks.prepare import open_engines, precision_report, prepare_data, warm_start
from tasks.ray_runtime import release, start_ray


def run_name(recipe: Recipe) -> str:
    """The recipe's name for the run, or one made of date and arm."""
    return recipe.name or f"{datetime.now():%Y%m%d-%H%M%S}-{recipe.arm or 'run'}"


@flow(name="train", flow_run_name="{recipe.arm}")
async def train(recipe: Recipe = Recipe()) -> dict[str, Any]:  # noqa: B008  a frozen model
    """Trains `recipe` from its first iteration to its last; returns the run's summary.

    Raises RecipeError before any engine starts, and RunExistsError where the run's name is taken.
    """
    require_runnable(recipe)
    backends = resolve(recipe)
    run = run_name(recipe)
    check_name(run)
    runs = Path(recipe.runs_dir).resolve()
    journal = Journal.create(runs, run, to_yaml(recipe), _about(recipe))
    context = RunContext(
        run=run,
        folder=journal.folder,
        model_dir=model_folder(recipe) or journal.folder / "model",
        recipe=settled(recipe),
    )
    status, state = "FAILED", "failed"
    with ExitStack() as at_the_end:
        # Whatever happens, and whichever of these fails: no engine is left running, and both records
        # say how the run ended.
        at_the_end.callback(lambda: journal.finish(state))
        for warning in warnings(recipe):
            get_run_logger().warning(warning)
            progress.emit(progress.Event("note", f"warning: {warning}"))
        progress.emit(progress.Event("phase", "MLflow and Ray start"))
        tracker = Tracker(recipe, run, _tags(recipe))
        at_the_end.callback(lambda: tracker.end(status))
        at_the_end.callback(release, context)
        try:
            start_ray()
            tracker.log_json("backends.json", {key: str(v) for key, v in vars(backends).items()})
            summary = await _train(context, tracker)
            status, state = "FINISHED", "finished"
            return summary
        except BaseException as error:
            # Cancelled, interrupted or told to terminate: not an error of the run's own.
            if not isinstance(error, Exception):
                status, state = "KILLED", "cancelled"
            raise


async def _train(context: RunContext, tracker: Tracker) -> dict[str, Any]:
    recipe = context.recipe
    tracker.log_json("data.json", await prepare_data(context))
    await warm_start(context)
    learner = await open_engines(context)
    bar = await acreate_progress_artifact(progress=0.0, key=_key(context.run, "progress"))
    _log(tracker, context, await first_weights(context))
    engine = await precision_report(context)
    columns = both_sides(learner, engine["parameters"])
    tracker.log_table("precision.json", columns)
    tracker.log_json("kv_cache.json", {"requested": recipe.precision.kv_cache, **engine["kv_cache"]})
    _say_precision(columns, engine["kv_cache"])
    for number in range(1, recipe.iterations + 1):
        _log(tracker, context, await iteration(context, number))
        await aupdate_progress_artifact(bar, progress=100.0 * number / recipe.iterations)
    summary = summarise(context.journal, recipe.iterations)
    summary |= {"run": context.run, "arm": recipe.arm, "mlflow_run": tracker.run_id}
    tracker.log_json("summary.json", summary)
    rows = [{"what": key, "value": str(value)} for key, value in summary.items()]
    await acreate_table_artifact(rows, key=_key(context.run, "summary"), description=context.run)
    return summary


def _say_precision(columns: dict[str, list[str]], kv_cache: dict[str, str]) -> None:
    """One line on what runs: parameters by effective format on each side, and the KV cache."""
    text = (
        f"effective precision: rollout {count_formats(columns['rollout_effective'])}; "
        f"KV cache {kv_cache['dtype']} ({kv_cache['storage']}); "
        f"learner {count_formats(columns['learner_effective'])}"
    )
    get_run_logger().info(text)
    progress.emit(progress.Event("note", text))


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
    tags = {
        "fp8rl.arm": recipe.arm or "",
        "fp8rl.recipe_digest": recipe.digest(),
        "fp8rl.seed": str(recipe.seed),
        "prefect.flow_run_id": str(flow_run.get_id()),
        "prefect.flow_run_name": str(flow_run.get_name()),
    }
    url = str(flow_run.get_flow_run_ui_url())
    if url.startswith("http"):  # the embedded server has no page of its own
        tags["prefect.flow_run_url"] = url
    return tags


def _about(recipe: Recipe) -> dict[str, Any]:
    """What the run was started with: all that can change its bits."""
    return {
        "arm": recipe.arm,
        "recipe_digest": recipe.digest(),
        "model": describe_model(recipe),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "pid": os.getpid(),
        "pid_started": process_start(os.getpid()),
        "prefect_flow_run": str(flow_run.get_id()),
        "machine": machine.describe(),
        "backends": {key: str(value) for key, value in vars(resolve(recipe)).items()},
        "environment": compute_environment(recipe),
    }
