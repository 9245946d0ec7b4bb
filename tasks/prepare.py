"""What comes before the first iteration: the model's folder, its warm start, the prompts."""

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
from fp8rl.journal import MODEL_FILE
from tasks.ray_runtime import engine_actor, learner_actor, wait

_STEPS_PER_CALL = 10


def _prepare_data(context: RunContext) -> dict[str, Any]:
    from fp8rl.data.prepare import prepare_data
    from fp8rl.model.tiny import write_tiny_model
    from fp8rl.preflight import require_backend

    require_backend(context.recipe)  # before the warm start, which takes minutes
    if context.recipe.model.is_tiny:
        write_tiny_model(context.recipe.model.tiny, context.model_dir)
    return prepare_data(context.recipe, context.model_dir, context.data_dir)


@task(name="prepare_data", cache_policy=NO_CACHE)
async def prepare_data(context: RunContext) -> dict[str, Any]:
    """Writes the tiny model's config and tokenizer, and the run's train and validation prompts.

    Returns the prompts' sizes and fingerprints.
    """
    import ray

    progress.emit(progress.Event("phase", "prompts"))
    environment = {"env_vars": compute_environment(context.recipe)}
    remote = ray.remote(_prepare_data).options(num_cpus=1, max_retries=0, runtime_env=environment)
    about: dict[str, Any] = await wait(remote.remote(context))
    return about


@task(name="warm_start", cache_policy=NO_CACHE)
async def warm_start(context: RunContext) -> None:
    """Puts the tiny model's warm-started weights into the run.

    They are cached under runs/.cache by what they are made of, and shared by all arms.
    """
    recipe = context.recipe
    if not recipe.model.is_tiny:
        return
    cache = context.folder.parent / ".cache" / "warm_start"
    weights = cache / f"{recipe.warm_start_digest()}.safetensors"
    if weights.is_file():
        progress.emit(progress.Event("phase", "warm start (cached)", done=1, total=1))
    else:
        cache.mkdir(parents=True, exist_ok=True)
        building = cache / f".{context.run}.{os.getpid()}"
        building.mkdir(exist_ok=True)
        await _train_warm_start(context, building)
        (building / MODEL_FILE).replace(weights)  # at once, and the same whoever comes last
        building.rmdir()
    get_run_logger().info("warm start: %s", weights)
    shutil.copyfile(weights, context.model_dir / MODEL_FILE)


async def _train_warm_start(context: RunContext, folder: Path) -> None:
    learner = learner_actor(context)
    await wait(learner.start_warm_start.remote(context))
    done, total = 0, context.recipe.warm_start.steps
    while done < total:
        progress.emit(progress.Event("phase", "warm start", done=done, total=total))
        done = (await wait(learner.advance_warm_start.remote(_STEPS_PER_CALL)))["done"]
    progress.emit(progress.Event("phase", "warm start", done=done, total=total))
    await wait(learner.finish_warm_start.remote(folder))


@task(name="open_engines", cache_policy=NO_CACHE)
async def open_engines(context: RunContext) -> list[dict[str, str]]:
    """Starts vLLM and builds the learner; returns the learner's table of effective precision."""
    progress.emit(progress.Event("phase", "vLLM and Megatron-core start"))
    engine = engine_actor(context)
    table: list[dict[str, str]] = await wait(learner_actor(context).open.remote(context))
    await wait(engine.status.remote())
    return table


@task(name="precision_report", cache_policy=NO_CACHE)
async def precision_report(context: RunContext) -> dict[str, Any]:
    """What the engine really runs, after its first forward; raises where it is not the plan."""
    report: dict[str, Any] = await wait(engine_actor(context).precision_report.remote())
    return report
