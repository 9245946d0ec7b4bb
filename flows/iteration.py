"""One GRPO iteration: the order of its steps, and nothing else."""

import time
from typing import Any

from prefect import flow
from prefect.states import Completed

from fp8rl.context import RunContext
from fp8rl.journal import ITERATION, StepRecord
from fp8rl.report import iteration_metrics, merged_metrics
from tasks.checkpoint import due, start_checkpoint
from tasks.evaluate import evaluate
from tasks.recalibrate_kv import recalibrate_kv
from tasks.requantize import requantize
from tasks.reward import reward
from tasks.rollout import forget_chunks, rollout
from tasks.train import train


def _cached() -> Any:
    """What a retried flow run is shown for an iteration that was done before: a state for each, since
    Prefect takes one that has been used for another run's.
    """
    return Completed(name="Cached", message="committed before")


@flow(name="iteration", flow_run_name="{context.run}/{iteration}", validate_parameters=False)
async def iteration(context: RunContext, iteration: int) -> Any:
    """rollout -> reward -> train -> requantize -> recalibrate_kv (-> evaluate, checkpoint every k).

    Each step that is committed already is taken from the journal. Commits the iteration's record: the
    metrics of all steps and its wall time, from rollout to new weights in the engine (evaluation and
    checkpoint are not part of it; of an iteration that was interrupted, the time of its steps).
    """
    if context.journal.is_committed(iteration, ITERATION):
        return _cached()
    started = time.perf_counter()
    records = [await rollout(context, iteration)]
    forget_chunks(context, iteration)
    for step in (reward, train, requantize, recalibrate_kv):
        records.append(await step(context, iteration))
    seconds = max(time.perf_counter() - started, sum(record["seconds"] for record in records))
    recipe = context.recipe
    if iteration % recipe.evaluate.every == 0 or iteration == recipe.iterations:
        records.append(await evaluate(context, iteration))
    _commit(context, iteration, seconds, records, iteration_metrics(records, seconds, recipe))
    # Where only the record of an earlier iteration was made again, the learner is further already.
    if due(context, iteration) and not context.journal.is_committed(iteration + 1, "train"):
        await start_checkpoint(context, iteration)
    return None


@flow(name="first-weights", flow_run_name="{context.run}/{iteration}", validate_parameters=False)
async def first_weights(context: RunContext, iteration: int) -> Any:
    """The weights that the run starts from: published, KV calibrated, evaluated before training."""
    if context.journal.is_committed(iteration, ITERATION):
        return _cached()
    records = [await step(context, iteration) for step in (requantize, recalibrate_kv, evaluate)]
    seconds = sum(record["seconds"] for record in records)
    _commit(context, iteration, seconds, records, merged_metrics(records))
    return None


def _commit(
    context: RunContext,
    iteration: int,
    seconds: float,
    records: list[dict[str, Any]],
    metrics: dict[str, float],
) -> None:
    """Commits the iteration's record, with its last step's time: made again, it has the same."""
    t_ms = max(record["t_ms"] for record in records)
    record = StepRecord(ITERATION, iteration, seconds, metrics=metrics, t_ms=t_ms)
    context.journal.commit(record, {})
