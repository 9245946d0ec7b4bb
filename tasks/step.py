"""What all step tasks share: a Prefect task that times itself, commits a record and returns it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from fp8rl import progress
from fp8rl.context import RunContext
from fp8rl.journal import StepRecord

# A step's work: files to commit, and the fields of its record.
StepWork = Callable[[RunContext, int], Awaitable[tuple[dict[str, bytes], dict[str, Any]]]]


def step(name: str) -> Callable[[StepWork], Any]:
    """Makes `work(context, iteration)` the step `name`.

    The task returns the committed record as a dict: names, versions, digests and metrics, no data.
    """

    def wrap(work: StepWork) -> Any:
        @task(name=name, task_run_name=name + "-{iteration}", cache_policy=NO_CACHE)
        async def run_step(context: RunContext, iteration: int) -> dict[str, Any]:
            progress.emit(progress.Event("step", name, iteration))
            started = time.perf_counter()
            limit = context.recipe.step_timeout_s
            try:
                files, fields = await asyncio.wait_for(work(context, iteration), limit)
            except TimeoutError:
                raise TimeoutError(
                    f"step {name} of iteration {iteration} took longer than step_timeout_s={limit:g}"
                ) from None
            record = StepRecord(name, iteration, time.perf_counter() - started, **fields)
            record = context.journal.commit(record, files)
            shown = {key: round(value, 4) for key, value in record.metrics.items()}
            get_run_logger().info("%s %d: %.2f s %s", name, iteration, record.seconds, shown or "")
            return asdict(record)

        run_step.__doc__ = work.__doc__
        return run_step

    return wrap
