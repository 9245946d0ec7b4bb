"""train: one iteration's samples, one or more optimiser steps, new master weights."""

from typing import Any

from fp8rl.context import RunContext
from tasks.ray_runtime import require_versions, wait
from tasks.step import step


@step("train")
async def train(context: RunContext, iteration: int) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Its record is its output: losses, mismatch, gradient norm."""
    version = iteration - 1
    _, learner = await require_versions(context, version)
    result = await wait(learner.train.remote(context, iteration))
    return {}, {
        "inputs": {
            "weight_version": version,
            "rollouts": context.journal.record(iteration, "rollout").files["rollouts.parquet"],
            "rewards": context.journal.record(iteration, "reward").files["rewards.parquet"],
        },
        "metrics": result["metrics"],
        "output": {"weight_version": result["version"], "tokens": result["tokens"]},
    }
