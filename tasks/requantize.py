"""requantize: the learner's weights in the rollout's formats, published and loaded by the engine."""

from typing import Any

from fp8rl.context import RunContext
from fp8rl.retention import KEPT_VERSIONS
from tasks.ensure import ensure_learner, require_digest, status_of
from tasks.inputs import masters_digest
from tasks.ray_runtime import engine_actor, wait
from tasks.step import step
from tasks.sync import send_weights


def _inputs(context: RunContext, iteration: int) -> dict[str, Any]:
    return {"weight_version": iteration, "weights": masters_digest(context, iteration)}


@step("requantize", _inputs)
async def requantize(context: RunContext, iteration: int) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Publishes weight version `iteration` and has the engine load it, without a restart."""
    folder = context.journal.weights_folder(iteration)
    learner = await ensure_learner(context, iteration)
    published = await wait(learner.publish.remote(folder, iteration))
    engine, _ = await status_of(context, "engine", engine_actor)
    digest = await send_weights(context, learner, engine, iteration)
    require_digest(iteration, digest, published["digest"])
    context.journal.drop_weights_before(iteration - KEPT_VERSIONS + 1)
    return {}, {
        "output": {"weight_version": iteration, "digest": published["digest"]},
        "metrics": {"sync/bytes": float(published["bytes"])},
    }
