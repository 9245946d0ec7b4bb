"""checkpoint: the learner's whole state, written beside the running iterations.

A checkpoint needs no record in the journal: its own manifest says that it is whole.
"""

import asyncio
import time
from typing import Any

import ray
from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from ray.exceptions import RayActorError

from fp8rl import checkpoints, guard, machine, progress
from fp8rl.context import RunContext
from fp8rl.data.cursor import first_batch
from fp8rl.retention import best, old_checkpoints
from fp8rl.runs import Run
from tasks.causes import first_line
from tasks.ensure import ensure_learner
from tasks.ray_runtime import LEARNER, is_new, learner_actor, release_actor, wait
from tasks.step import with_retries


def _state(context: RunContext, version: int) -> dict[str, Any]:
    """What a checkpoint keeps besides tensors and random states."""
    journal, origin = context.journal, context.origin
    prepared = journal.record(origin, "prepare_data")
    scales = None
    if journal.is_committed(version, "recalibrate_kv"):
        record = journal.record(version, "recalibrate_kv")
        if record.files:
            scales = journal.read_file(version, "recalibrate_kv", "kv_scales.json").decode()
    return {
        "run": context.run,
        "run_id": journal.run_id,
        "recipe_digest": context.recipe.step_digest(),
        "next_iteration": version + 1,
        "next_batch": first_batch(context, version + 1),
        "data": {"files": prepared.files, **prepared.output},
        "kv_scales": scales,
        "kv_history": _kv_history(context, version),
        "guard": guard.window(journal, context.recipe.guard, version, origin),
        "best": best(Run(context.folder)),
        "mlflow_run": context.mlflow_run,
        "machine": machine.describe(),
    }


_KV_METRICS = (
    *("kv/k_scale_max", "kv/v_scale_max", "kv/tokens"),
    *("kv/saturated_share", "kv/underflow_share"),
)


def _kv_history(context: RunContext, version: int) -> dict[str, dict[str, float]]:
    """The greatest scales of each version so far, and what the rollout before it could not hold; those
    of every layer stay in the journal."""
    history = {}
    for record in context.journal.iterations():
        found = {name: record.metrics[name] for name in _KV_METRICS if name in record.metrics}
        if found and record.iteration <= version:
            history[str(record.iteration)] = found
    return history


@task(name="checkpoint", task_run_name="checkpoint-{version}", cache_policy=NO_CACHE)
async def _start(context: RunContext, version: int) -> None:
    await asyncio.wait_for(_begin(context, version), context.recipe.step_timeout_s)


async def _begin(context: RunContext, version: int) -> None:
    learner = await ensure_learner(context, version)
    await _finish(context, learner, block=True)
    folder = checkpoints.checkpoint_folder(context.folder, version)
    asynchronous = context.recipe.checkpoint.asynchronous
    state = _state(context, version)
    await wait(learner.start_checkpoint.remote(folder, version, state, asynchronous))


async def start_checkpoint(context: RunContext, version: int) -> None:
    """Begins the checkpoint of weight `version`; nothing where there is a whole one."""
    if not is_checkpointed(context, version):
        await with_retries(_start, context)(context, version)


def is_checkpointed(context: RunContext, version: int) -> bool:
    """Whether there is a whole checkpoint of `version`."""
    folder = checkpoints.checkpoint_folder(context.folder, version)
    try:
        checkpoints.verify(folder, context.journal.run_id)
    except checkpoints.CheckpointError:
        return False
    return True


async def finish_checkpoint(context: RunContext, *, block: bool) -> None:
    """Takes note of a checkpoint that has been written, and drops those that retention lets go.

    block: waits for one that is being written. Raises what its writing raised.
    """
    if is_new(context, LEARNER):
        return
    try:
        work = _finish(context, learner_actor(context), block=block)
        await asyncio.wait_for(work, context.recipe.step_timeout_s)
    except RayActorError as error:
        # The next step that needs the learner makes it again; the next checkpoint takes the place of
        # the one that died with it.
        text = f"a checkpoint was lost with its learner: {first_line(error)}"
        progress.emit(progress.Event("note", text))
        release_actor(context, LEARNER)


async def _finish(context: RunContext, learner: Any, *, block: bool) -> None:
    version = await wait(learner.finish_checkpoint.remote(block))
    if version is not None:
        get_run_logger().info("checkpoint of version %d is written", version)
        for old in old_checkpoints(Run(context.folder)):
            checkpoints.drop(context.folder, old)
            get_run_logger().info("checkpoint of version %d is dropped", old)


def save_before_leaving(context: RunContext) -> str:
    """Saves the learner's weights now, if they are committed and not saved yet, within the recipe's
    grace; returns in words what was done. For a process that is about to end: it waits without the
    event loop, and never raises.
    """
    if is_new(context, LEARNER):
        return "the learner was not up: nothing to save"
    grace = context.recipe.checkpoint.grace_s
    deadline = time.monotonic() + grace

    def left() -> float:
        return max(0.1, deadline - time.monotonic())

    try:
        learner = learner_actor(context)
        held = ray.get(learner.status.remote(), timeout=left())["version"]
        ray.get(learner.finish_checkpoint.remote(True), timeout=left())
        if held == context.origin:
            return "the learner holds the weights that the run starts from: nothing to save"
        if held is None or not context.journal.is_committed(held, "train"):
            return "the learner is in the middle of a step: training will be replayed"
        folder = checkpoints.checkpoint_folder(context.folder, held)
        if not (folder / checkpoints.MANIFEST).is_file():
            state = _state(context, held)
            ray.get(learner.start_checkpoint.remote(folder, held, state, False), timeout=left())
        return f"checkpoint of version {held} is written"
    except Exception as error:  # whatever it is, the run can be resumed without this checkpoint
        return f"no checkpoint could be written within {grace:g} s ({type(error).__name__}: {error})"


def due(context: RunContext, iteration: int) -> bool:
    """Whether the recipe wants a checkpoint after `iteration`."""
    recipe = context.recipe
    return iteration % recipe.checkpoint.every == 0 or iteration == recipe.iterations
