"""requantize: the learner's weights in the rollout's formats, published and loaded by the engine."""

from typing import Any

from fp8rl.context import RunContext
from fp8rl.retention import KEPT_VERSIONS
from tasks.ensure import engine_for, ensure_learner, require_digest
from tasks.inputs import in_bf16, masters_digest
from tasks.ray_runtime import wait
from tasks.step import step
from tasks.sync import send_weights


def _inputs(context: RunContext, iteration: int) -> dict[str, Any]:
    inputs = {"weight_version": iteration, "weights": masters_digest(context, iteration)}
    return inputs | ({"in_bf16": True} if in_bf16(context, iteration) else {})


@step("requantize", _inputs)
async def requantize(context: RunContext, iteration: int) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Publishes weight version `iteration` and has the engine load it, without a restart; in BF16 where
    the guard says so."""
    folder = context.journal.weights_folder(iteration)
    learner = await ensure_learner(context, iteration)
    published = await wait(learner.publish.remote(folder, iteration, in_bf16(context, iteration)))
    engine, _ = await engine_for(context, iteration)
    digest = await send_weights(context, learner, engine, iteration)
    require_digest(iteration, digest, published["digest"])
    context.journal.drop_weights_before(iteration - KEPT_VERSIONS + 1)
    return {}, {
        "output": {"weight_version": iteration, "digest": published["digest"]},
        "metrics": {"sync/bytes": float(published["bytes"])},
    }
