"""requantize: the learner's weights in the rollout's formats, published and loaded by the engine."""

from typing import Any

from fp8rl.context import RunContext
from tasks.ray_runtime import engine_actor, learner_actor, wait
from tasks.step import step

KEPT_VERSIONS = 2


@step("requantize")
async def requantize(context: RunContext, iteration: int) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Publishes weight version `iteration` and has the engine load it, without a restart."""
    folder = context.journal.weights_folder(iteration)
    learner = learner_actor(context)
    published = await wait(learner.publish.remote(folder, iteration))
    loaded = await wait(engine_actor(context).load_weights.remote(folder, iteration))
    if loaded != published["digest"]:
        raise RuntimeError(
            f"weight version {iteration}: the engine loaded {loaded}, "
            f"published was {published['digest']}"
        )
    context.journal.drop_weights_before(iteration - KEPT_VERSIONS + 1)
    return {}, {
        "inputs": {"weight_version": iteration},
        "output": {"weight_version": iteration, "digest": loaded},
        "metrics": {"sync/bytes": float(published["bytes"])},
    }
