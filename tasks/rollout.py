"""rollout: the engine samples the iteration's prompts under the current weights."""

from typing import Any

from fp8rl.context import RunContext
from tasks.ray_runtime import require_versions, wait
from tasks.step import step


@step("rollout")
async def rollout(context: RunContext, iteration: int) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Writes rollouts.parquet."""
    version = iteration - 1
    engine, _ = await require_versions(context, version)
    table, metrics = await wait(engine.rollout.remote(iteration, version))
    return {"rollouts.parquet": table}, {"inputs": {"weight_version": version}, "metrics": metrics}
