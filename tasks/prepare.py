"""What comes before the first iteration: the model's folder, its warm start, the prompts."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from fp8rl import progress
from fp8rl.context import RunContext
from fp8rl.device import compute_environment
from fp8rl.recipe.schema import Recipe
from tasks.ray_runtime import engine_actor, learner_actor, wait

_STEPS_PER_CALL = 10


def _write_tiny(recipe: Recipe, folder: Path) -> None:
    from fp8rl.model.tiny import write_tiny_model

    write_tiny_model(recipe.model.tiny, folder)


def _prepare_data(recipe: Recipe, model_dir: Path, folder: Path) -> dict[str, Any]:
    from fp8rl.data.prepare import prepare_data

    return prepare_data(recipe, model_dir, folder)


def _remote(function: Any, recipe: Recipe) -> Any:
    import ray

    environment = {"env_vars": compute_environment(recipe)}
    return ray.remote(function).options(num_cpus=1, max_retries=0, runtime_env=environment)


@task(name="warm_start", cache_policy=NO_CACHE)
async def warm_start(run: str, recipe: Recipe) -> Path:
    """The Hugging Face folder of the initial weights: the recipe's own, or the warm-started model.

    The warm start is cached under runs/.cache by what it is made of, and shared by all arms.
    """
    if recipe.model.path is not None:
        return Path(recipe.model.path).resolve()
    cache = Path(recipe.runs_dir).resolve() / ".cache" / "warm_start"
    folder = cache / recipe.warm_start_digest()
    if (folder / "done.json").is_file():
        get_run_logger().info("warm start found in %s", folder)
        progress.emit(progress.Event("phase", "warm start (cached)", done=1, total=1))
        return folder
    building = cache / f".{folder.name}.{os.getpid()}"
    shutil.rmtree(building, ignore_errors=True)
    await wait(_remote(_write_tiny, recipe).remote(recipe, building))
    learner = learner_actor(run, recipe)
    await wait(learner.start_warm_start.remote(recipe, building))
    state: dict[str, Any] = {"done": 0, "total": recipe.warm_start.steps, "loss": float("nan")}
    while state["done"] < state["total"]:
        progress.emit(progress.Event("phase", "warm start", done=state["done"], total=state["total"]))
        state = await wait(learner.advance_warm_start.remote(_STEPS_PER_CALL))
    progress.emit(progress.Event("phase", "warm start", done=state["total"], total=state["total"]))
    await wait(learner.finish_warm_start.remote(building))
    (building / "done.json").write_text(json.dumps(state))
    try:
        building.rename(folder)
    except OSError:  # another run has built the same in the meantime
        if not (folder / "done.json").is_file():
            raise
        shutil.rmtree(building)
    return folder


@task(name="prepare_data", cache_policy=NO_CACHE)
async def prepare_data(context: RunContext) -> dict[str, Any]:
    """Writes the run's train and validation prompts; returns sizes and fingerprints."""
    progress.emit(progress.Event("phase", "prompts"))
    remote = _remote(_prepare_data, context.recipe)
    about: dict[str, Any] = await wait(
        remote.remote(context.recipe, context.model_dir, context.data_dir)
    )
    return about


@task(name="open_engines", cache_policy=NO_CACHE)
async def open_engines(context: RunContext) -> list[dict[str, str]]:
    """Starts vLLM and builds the learner; returns the learner's table of effective precision."""
    progress.emit(progress.Event("phase", "vLLM and Megatron-core start"))
    engine = engine_actor(context)
    learner = learner_actor(context.run, context.recipe)
    table: list[dict[str, str]] = await wait(learner.open.remote(context))
    await wait(engine.status.remote())
    return table


@task(name="precision_report", cache_policy=NO_CACHE)
async def precision_report(context: RunContext) -> dict[str, Any]:
    """What the engine really runs, after its first forward; raises where it is not the plan."""
    report: dict[str, Any] = await wait(engine_actor(context).precision_report.remote())
    return report
