"""What comes before the first iteration: the model's folder, its warm start, the prompts."""

import asyncio
import os
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from fp8rl import checkpoints, progress
from fp8rl.context import RunContext
from fp8rl.data.fingerprint import left_out, read_digests, source_digests
from fp8rl.device import compute_environment
from fp8rl.files import copy_atomic, file_sha256, fsync_file, sha256
from fp8rl.journal import MODEL_FILE
from fp8rl.model.source import warm_start_file
from fp8rl.recipe.data import all_sources
from fp8rl.recipe.rules import RecipeError
from tasks.ensure import engine_context, engine_for, ensure_learner
from tasks.ray_runtime import ENGINE, engine_actor, is_new, learner_actor, wait
from tasks.step import step

_STEPS_PER_CALL = 10


def _prepare_data(context: RunContext) -> dict[str, Any]:
    from fp8rl.data.prepare import prepare_data
    from fp8rl.model.tiny import write_tiny_model
    from fp8rl.preflight import require_backend

    require_backend(context.recipe)  # before the warm start, which takes minutes
    if context.recipe.model.is_tiny:
        write_tiny_model(context.recipe.model.tiny, context.model_dir)
    return prepare_data(context.recipe, context.model_dir, context.data_dir)


def _files(context: RunContext, iteration: int) -> dict[str, Any]:
    """The digests of the local files that the prompts come from. Of prompts that are there already,
    those of then: opening the run has compared them, and a file that is gone since is no loss.
    """
    journal = context.journal
    if journal.is_committed(iteration, "prepare_data"):
        files = journal.record(iteration, "prepare_data").inputs.get("files")
    else:
        files = source_digests(context.recipe.task)
    return {"files": files} if files else {}


def _environment(context: RunContext) -> dict[str, str]:
    """As of every computing process, but that a hub data set may be asked for where the user's own
    environment does not forbid it."""
    environment = compute_environment(context.recipe)
    if any(one.source.hub is not None for one in all_sources(context.recipe.task)):
        environment["HF_HUB_OFFLINE"] = os.environ.get("HF_HUB_OFFLINE", "0")
    return environment


def _no_inputs(context: RunContext, iteration: int) -> dict[str, Any]:
    return {}


@step("prepare_data", _files)
async def prepare_data(context: RunContext, iteration: int) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Writes the tiny model's config and tokenizer, and the run's train and validation prompts.

    Its output: the prompts' sizes and fingerprints, and what each source gave and lost.
    """
    import ray

    progress.emit(progress.Event("phase", "prompts"))
    before = _files(context, iteration).get("files", {})
    environment = {"env_vars": _environment(context)}
    remote = ray.remote(_prepare_data).options(num_cpus=1, max_retries=0, runtime_env=environment)
    about: dict[str, Any] = await wait(remote.remote(context))
    if changed := [path for path, digest in read_digests(about).items() if before.get(path) != digest]:
        raise RecipeError(f"task.sources: {', '.join(changed)} changed while it was read; try again")
    for line in left_out(about):
        get_run_logger().warning(line)
        progress.emit(progress.Event("note", line))
    written = sorted(context.data_dir.glob("*.parquet"))
    if context.recipe.model.is_tiny:  # its config and tokenizer; the weights are the warm start's
        written += sorted(p for p in context.model_dir.iterdir() if p.name != MODEL_FILE)
    return {}, {"output": about, "written": tuple(written)}


@step("warm_start", _no_inputs)
async def warm_start(context: RunContext, iteration: int) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Settles the weights that the run starts from; its output: their digest.

    For the tiny model these are warm-started ones, cached under runs/.cache by what they are made of
    and shared by all arms; for a fork those of its checkpoint, with the batch of prompts that is next.
    """
    if context.origin > 0:
        return {}, {"output": forked_from(context)}
    if not context.recipe.model.is_tiny:
        return {}, {"output": {"weights": await asyncio.to_thread(_folder_digest, context.model_dir)}}
    await _warm_start(context)
    model = context.model_dir / MODEL_FILE
    return {}, {"output": {"weights": file_sha256(model)}, "written": (model,)}


def forked_from(context: RunContext) -> dict[str, Any]:
    """What a fork starts from, by its checkpoint: {"weights": digest, "next_batch": of prompts}."""
    folder = checkpoints.checkpoint_folder(context.folder, context.origin)
    # A checkpoint that does not say is of a run whose iterations drew one batch each.
    batch = checkpoints.read_state(folder).get("next_batch", context.origin)
    return {"weights": checkpoints.read_manifest(folder).weights_digest, "next_batch": batch}


def _folder_digest(folder: Path) -> str:
    """sha256 over the names and contents of a model folder's weights."""
    return sha256(
        "".join(f"{p.name} {file_sha256(p)}\n" for p in sorted(folder.glob("*.safetensors"))).encode()
    )


async def _warm_start(context: RunContext) -> None:
    recipe = context.recipe
    weights = warm_start_file(recipe, context.folder.parent)
    cache = weights.parent
    if weights.is_file():
        progress.emit(progress.Event("phase", "warm start (cached)", done=1, total=1))
    else:
        cache.mkdir(parents=True, exist_ok=True)
        building = cache / f".{context.run}.{os.getpid()}"
        building.mkdir(exist_ok=True)
        await _train_warm_start(context, building)
        fsync_file(building / MODEL_FILE)
        (building / MODEL_FILE).replace(weights)  # at once, and the same whoever comes last
        building.rmdir()
    get_run_logger().info("warm start: %s", weights)
    copy_atomic(weights, context.model_dir / MODEL_FILE)


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
async def open_engines(context: RunContext, version: int) -> list[dict[str, str]]:
    """Starts vLLM and brings the learner to weight `version`, from a checkpoint and by replay.

    Returns the learner's table of effective precision.
    """
    progress.emit(progress.Event("phase", "vLLM and Megatron-core start"))
    return await asyncio.wait_for(_open(context, version), context.recipe.step_timeout_s)


async def _open(context: RunContext, version: int) -> list[dict[str, str]]:
    engine_actor(engine_context(context, version))  # starts in the background
    learner = await ensure_learner(context, version)
    table: list[dict[str, str]] = await wait(learner.precision_table.remote())
    progress.emit(progress.Event("phase", "vLLM starts"))
    await engine_for(context, version)
    return table


@task(name="precision_report", cache_policy=NO_CACHE)
async def precision_report(context: RunContext) -> dict[str, Any]:
    """What the engine really runs; raises where it is not the plan. Empty before its first forward."""
    if is_new(context, ENGINE):
        return {}
    report: dict[str, Any] = await wait(engine_actor(context).precision_report.remote())
    return report
