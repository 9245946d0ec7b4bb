"""train: one iteration's samples, one or more optimiser steps, new master weights."""

from typing import Any

from prefect.logging import get_run_logger

from fp8rl.context import RunContext
from fp8rl.recipe.precision import Linear
from tasks.ensure import ensure_learner
from tasks.inputs import file_digest, kv_scales_inputs, masters_digest
from tasks.ray_runtime import wait
from tasks.step import ran_out_of_memory, step


def _inputs(context: RunContext, iteration: int) -> dict[str, Any]:
    version = iteration - 1
    rounds_kv = context.recipe.precision.learner_kv is Linear.FP8
    return {
        "weight_version": version,
        "weights": masters_digest(context, version),
        "rollouts": file_digest(context, iteration, "rollout", "rollouts.parquet"),
        "rewards": file_digest(context, iteration, "reward", "rewards.parquet"),
        **(kv_scales_inputs(context, version) if rounds_kv else {}),
    }


@step("train", _inputs)
async def train(context: RunContext, iteration: int) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Writes worst_samples.parquet. Its record: losses, mismatch, gradient norm, what the guard
    decided, and the digest of the new weights."""
    learner = await ensure_learner(context, iteration - 1)
    size = _micro_batch(context, iteration)
    result = await wait(learner.train.remote(context, iteration, size))
    return {"worst_samples.parquet": result["worst"]}, {
        "metrics": result["metrics"],
        "output": {
            "weight_version": result["version"],
            "weights": result["weights"],
            "tokens": result["tokens"],
            "micro_batch": size,
            "guard": result["guard"],
        },
    }


def _micro_batch(context: RunContext, iteration: int) -> int:
    """The recipe's, or what was left of it after memory ran out."""
    asked = context.recipe.learner.micro_batch
    size = asked
    if iteration - 1 > context.origin:
        size = int(context.journal.record(iteration - 1, "train").output["micro_batch"])
    if ran_out_of_memory(context) and size == asked:
        size = max(1, asked // 2)
    if size != asked:
        get_run_logger().warning(
            "memory ran out: training with learner.micro_batch=%d, asked for were %d", size, asked
        )
    return size
