"""One GRPO iteration: the order of its steps, and nothing else."""

import time
from typing import Any

from prefect import flow

from fp8rl.context import RunContext
from fp8rl.journal import StepRecord
from fp8rl.report import iteration_metrics
from tasks.evaluate import evaluate
from tasks.recalibrate_kv import recalibrate_kv
from tasks.requantize import requantize
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.train import train


@flow(name="iteration", flow_run_name="{context.run}/{iteration}", validate_parameters=False)
async def iteration(context: RunContext, iteration: int) -> dict[str, Any]:
    """rollout -> reward -> train -> requantize -> recalibrate_kv (-> evaluate every k).

    Returns the iteration's record: the metrics of all steps and its wall time, from rollout to new
    weights in the engine (the evaluation is not part of it).
    """
    started = time.perf_counter()
    records = [
        await step(context, iteration) for step in (rollout, reward, train, requantize, recalibrate_kv)
    ]
    seconds = time.perf_counter() - started
    recipe = context.recipe
    if iteration % recipe.evaluate.every == 0 or iteration == recipe.iterations:
        records.append(await evaluate(context, iteration))
    metrics = iteration_metrics(records, seconds, recipe)
    record = context.journal.commit(StepRecord("iteration", iteration, seconds, metrics=metrics), {})
    return {"iteration": iteration, "metrics": record.metrics, "t_ms": record.t_ms}


@flow(name="first-weights", flow_run_name="{context.run}/0", validate_parameters=False)
async def first_weights(context: RunContext) -> dict[str, Any]:
    """Iteration 0: the initial weights published, KV calibrated, and evaluated before training."""
    started = time.perf_counter()
    records = [await step(context, 0) for step in (requantize, recalibrate_kv, evaluate)]
    seconds = time.perf_counter() - started
    metrics = {key: value for record in records for key, value in record["metrics"].items()}
    record = context.journal.commit(StepRecord("iteration", 0, seconds, metrics=metrics), {})
    return {"iteration": 0, "metrics": record.metrics, "t_ms": record.t_ms}
