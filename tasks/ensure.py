"""Engine and learner, alive and holding what a step needs: whatever happened before.

An actor that died is made again; one that holds other weights than wanted is given the right ones.
The engine gets them from the run folder. The learner goes back to the newest whole checkpoint and is
trained again over the journalled rollouts, without generating; each step of that must come to the
weights whose digest the step recorded.
"""

import asyncio
import time
from typing import Any

from prefect.logging import get_run_logger
from ray.exceptions import RayActorError

from fp8rl import checkpoints, progress
from fp8rl.context import RunContext
from fp8rl.device import resolve
from fp8rl.recipe.precision import Linear
from fp8rl.recipe.schema import Device
from fp8rl.sync.errors import SyncError
from fp8rl.sync.probe import Scores, scores_digest
from tasks.causes import first_line
from tasks.inputs import has_fp8_kv, in_bf16, kv_scales_of, masters_digest
from tasks.ray_runtime import (
    ENGINE,
    LEARNER,
    actor_of,
    has_answered,
    note_answer,
    release_actor,
    wait,
)

# An actor that is up answers at once; one that does not is stuck, and is made again.
HEALTH_S = 60.0
# An engine that computes other bits than the one before it is rare and stays so for the life of its
# process: so often another is made.
REMADE = 2


class ReplayError(RuntimeError):
    """Training over the journalled rollouts did not come to the weights that were recorded."""


async def status_of(context: RunContext, kind: str) -> tuple[Any, dict[str, Any]]:
    """(handle, what it holds) of the actor `kind`, which answers; a dead or stuck one is made again.

    One that has not answered yet is starting: that may take as long as the step may.
    """
    actor = actor_of(context, kind)
    limit = HEALTH_S if has_answered(context, kind) else None
    try:
        status = await asyncio.wait_for(wait(actor.status.remote()), limit)
    except (RayActorError, TimeoutError) as error:
        said = first_line(error) if str(error) else "it does not answer"
        get_run_logger().warning("the %s is made again: %s", kind, said)
        progress.emit(progress.Event("note", f"the {kind} is made again: {said}"))
        release_actor(context, kind)
        actor = actor_of(context, kind)
        status = await wait(actor.status.remote())
    note_answer(context, kind)
    return actor, status


async def ensure_learner(context: RunContext, version: int) -> Any:
    """The learner, holding weight `version`."""
    actor, status = await status_of(context, LEARNER)
    if status["version"] != version:
        await _restore_learner(context, actor, version)
    return actor


async def _restore_learner(context: RunContext, actor: Any, version: int) -> None:
    started = time.perf_counter()
    checkpoint, damaged = checkpoints.newest_whole(
        context.folder, at_most=version, run_id=context.journal.run_id
    )
    for line in damaged:
        progress.emit(progress.Event("note", f"checkpoint passed over: {line}"))
    folder = None if checkpoint is None else checkpoint.folder
    taken_up = await wait(actor.restore.remote(context, folder))
    held: int = taken_up["version"]
    if checkpoint is not None and taken_up["weights"] != masters_digest(context, held):
        raise ReplayError(
            f"{checkpoint.folder} gave other weights than those that train recorded for iteration "
            f"{held}. Remove that folder, then `fp8rl resume {context.run}`: an older checkpoint and "
            "more replay take its place"
        )
    if held < version:
        # A first forward pass, as before the first step of a new run: what is compiled and allocated
        # once is start-up, not replay.
        await wait(actor.precision_table.remote())
    restored = time.perf_counter()
    if held < version and resolve(context.recipe).device is Device.CPU:
        # On shared cores an engine's start beside the replay costs both more than one after the other.
        await engine_for(context, version)
    ready = time.perf_counter()
    for iteration in range(held + 1, version + 1):
        text = f"replay to iteration {version}"
        progress.emit(progress.Event("phase", text, done=iteration - held - 1, total=version - held))
        await replay(context, actor, iteration)
    now = time.perf_counter()
    progress.emit(
        progress.Event(
            "restored",
            metrics={
                "load_s": restored - started,
                "replay_s": now - ready,
                "replayed": float(version - held),
            },
        )
    )


async def replay(context: RunContext, actor: Any, iteration: int) -> None:
    """Trains the learner on the committed rollouts of `iteration` again.

    Raises ReplayError where that does not come to the recorded weights.
    """
    recorded = context.journal.record(iteration, "train").output
    again = await wait(actor.train.remote(context, iteration, recorded["micro_batch"]))
    if again["weights"] != recorded["weights"]:
        raise ReplayError(
            f"training again over iteration {iteration}'s rollouts gave weights "
            f"{again['weights'][:12]}, recorded were {recorded['weights'][:12]}. The machine, its "
            "number of threads or a library differs from when it was recorded (attempts/*.json in "
            f"{context.folder} say what they were). Go on where they are the same, or fork from a "
            f"checkpoint: `fp8rl resume {context.run} --fork NEW_NAME`"
        )


def engine_context(context: RunContext, version: int) -> RunContext:
    """What the engine is made from, whose next weights are `version`: with a BF16 KV cache where the
    guard has taken that rollout out of FP8. vLLM allocates its cache once, so it cannot be switched as
    the linears are."""
    precision = context.recipe.precision
    if has_fp8_kv(context, version) or precision.kv_cache is Linear.BF16:
        return context
    precision = precision.model_copy(update={"kv_cache": Linear.BF16})
    recipe = context.recipe.model_copy(update={"precision": precision})
    return context.model_copy(update={"recipe": recipe})


async def engine_for(context: RunContext, version: int) -> tuple[Any, dict[str, Any]]:
    """(handle, what it holds) of an engine that can take weight `version`: alive, and with its KV
    cache. One with the other cache is made again."""
    wanted = engine_context(context, version)
    actor, status = await status_of(wanted, ENGINE)
    fp8_kv = wanted.recipe.precision.kv_cache is Linear.FP8
    if status["fp8_kv"] != fp8_kv:
        kind = "FP8" if fp8_kv else "BF16"
        text = f"the engine is made again, with its KV cache in {kind}, for weight version {version}"
        progress.emit(progress.Event("note", text))
        release_actor(context, ENGINE)
        actor, status = await status_of(wanted, ENGINE)
    return actor, status


async def ensure_engine(context: RunContext, version: int, *, scales: bool = True) -> Any:
    """The engine, holding the published weight `version`, and its KV scales if `scales`.

    One that was given something must score the probe's tokens as recorded, bit by bit, where the device
    repeats its bits. Raises RuntimeError where it loaded other weights than those that were recorded.
    """
    actor, status = await engine_for(context, version)
    if not await _give(context, actor, status, version, scales) or not scales:
        return actor
    odd = "the engine scores the probe not as recorded; "
    for _ in range(REMADE):
        if await _scores_as_recorded(context, actor, version):
            return actor
        progress.emit(progress.Event("note", odd + "it is made again"))
        release_actor(context, ENGINE)
        actor, status = await engine_for(context, version)
        await _give(context, actor, status, version, scales)
    if not await _scores_as_recorded(context, actor, version):
        text = "it goes on: samples may differ in their last bits from an uninterrupted run's"
        progress.emit(progress.Event("note", odd + text))
    return actor


async def _give(
    context: RunContext, actor: Any, status: dict[str, Any], version: int, scales: bool
) -> bool:
    """Has the engine load what it lacks of `version`; whether that was anything."""
    given = False
    if status["version"] != version:
        recorded = context.journal.record(version, "requantize").output["digest"]
        await load_published(context, actor, version, recorded)
        status["kv_version"] = None
        given = True
    if scales and has_fp8_kv(context, version) and status["kv_version"] != version:
        content = kv_scales_of(context, version)
        await wait(actor.apply_kv_scales.remote(content))
        given = True
    return given


async def _scores_as_recorded(context: RunContext, actor: Any, version: int) -> bool:
    """Whether the engine's scores of the probe are those recorded.

    True where none are, where the recipe asks for other tokens by now, and where bits do not repeat on
    this device.
    """
    recorded = context.journal.record(version, "recalibrate_kv").output.get("probe")
    if recorded is None or resolve(context.recipe).device is not Device.CPU:
        return True
    scores: Scores = await wait(actor.score_probe.remote(version))
    if sum(map(len, scores)) != recorded["tokens"]:
        return True
    return scores_digest(scores) == recorded["digest"]


async def load_published(context: RunContext, engine: Any, version: int, recorded: str) -> None:
    """Has `engine` load weight `version`; published again where it was damaged or cleaned away.

    Raises RuntimeError where the weights are not those whose manifest has the digest `recorded`.
    """
    folder, bf16 = context.journal.weights_folder(version), in_bf16(context, version)
    loaded = await wait(engine.load_weights.remote(folder, version, bf16))
    if loaded.get("digest") == recorded:
        return
    fault = loaded.get("fault", f"{folder} holds other weights than those that were recorded")
    progress.emit(progress.Event("note", f"weights are published again: {fault}"))
    learner = await ensure_learner(context, version)
    published = await wait(learner.publish.remote(folder, version, bf16))
    require_digest(version, published["digest"], recorded)
    loaded = await wait(engine.load_weights.remote(folder, version, bf16))
    if "fault" in loaded:
        raise SyncError(loaded["fault"])
    require_digest(version, loaded["digest"], recorded)


def require_digest(version: int, found: str, recorded: str) -> None:
    """Raises RuntimeError unless the weights `found` are those `recorded`."""
    if found != recorded:
        raise RuntimeError(
            f"weight version {version}: {found[:12]} is there, {recorded[:12]} was recorded"
        )
