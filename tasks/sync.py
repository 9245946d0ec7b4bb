"""Weights from the learner into the engine, bucket by bucket, and the probe that follows.

The flow process holds references only. One bucket is read while the one before it is being taken; an
error on either side ends the sync at once and reaches the step, and the engine, dirty since the first
byte, refuses to generate until a sync is whole.
"""

import asyncio
from typing import Any

from fp8rl.context import RunContext
from fp8rl.sync import probe
from tasks.inputs import in_bf16
from tasks.ray_runtime import until_there, wait


async def send_weights(context: RunContext, learner: Any, engine: Any, version: int) -> str:
    """Has the engine take published weight `version` from the learner; returns the manifest's digest.

    Raises SyncError, PublishedWeightsError as `Engine`, RayActorError where a process died,
    and TimeoutError after sync.timeout_s.
    """
    limit = context.recipe.sync.timeout_s
    try:
        return await asyncio.wait_for(_send(context, learner, engine, version), limit)
    except TimeoutError as error:
        if str(error):
            raise
        text = f"the sync of weight version {version} took longer than sync.timeout_s={limit:g}"
        raise TimeoutError(text) from None


async def _send(context: RunContext, learner: Any, engine: Any, version: int) -> str:
    folder = context.journal.weights_folder(version)
    manifest = await wait(learner.begin_send.remote(folder, version))
    buckets: int = await wait(engine.begin_sync.remote(manifest, in_bf16(context, version)))
    taken = None
    for index in range(buckets):
        sent = learner.send.remote(version, index)
        await until_there(sent, fetch=False)  # it goes from the learner to the engine
        if taken is not None:
            await wait(taken)
        taken = engine.receive.remote(index, sent)
    if taken is not None:
        await wait(taken)
    digest: str = await wait(engine.finish_sync.remote())
    return digest


async def probe_engine(
    context: RunContext, learner: Any, engine: Any, version: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """(output, metrics) of the probe of weight `version`; both empty where the recipe asks for none.

    Raises ProofError.
    """
    if not probe.is_probed(context.recipe, version, context.origin):
        return {}, {}
    ours, theirs = engine.score_probe.remote(version), learner.score_probe.remote(context, version)
    limit = probe.limit_of(context.recipe, rollout_bf16=in_bf16(context, version))
    found = probe.compare(await wait(ours), await wait(theirs), limit=limit, version=version)
    output = {"digest": found.digest, "tokens": found.tokens, "limit": limit}
    return {"probe": output}, found.metrics
