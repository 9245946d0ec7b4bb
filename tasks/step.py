"""What all step tasks share: a Prefect task that looks whether its output is committed, else does the
work, commits a record, and is tried again where its failure can pass.

The journal is what remembers, not Prefect's result store: a step found in the journal is shown as
Cached, whichever flow run committed it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.states import Completed

from fp8rl import faults, progress
from fp8rl.context import RunContext
from fp8rl.journal import JournalError, StepRecord
from tasks.causes import Cause, cause_of, first_line

# A step's work: files to commit, and the fields of its record.
StepWork = Callable[[RunContext, int], Awaitable[tuple[dict[str, bytes], dict[str, Any]]]]
# What the step comes from, by digest and version: read from the journal alone.
StepInputs = Callable[[RunContext, int], dict[str, Any]]

# Retries so far of each run in this process, and runs whose training ran out of memory.
_retries: dict[str, int] = {}
_out_of_memory: set[str] = set()


def ran_out_of_memory(context: RunContext) -> bool:
    """Whether a train step of the run failed in this process because memory ran out."""
    return context.run in _out_of_memory


def step(name: str, inputs: StepInputs) -> Callable[[StepWork], Any]:
    """Makes `work(context, iteration)` the step `name`, which comes from `inputs(context, iteration)`.

    The step returns the committed record as a dict: names, versions, digests and metrics, no data. Its
    attribute `work` is the work alone.
    """

    def wrap(work: StepWork) -> Any:
        @task(name=name, task_run_name=name + "-{iteration}", cache_policy=NO_CACHE)
        async def run_step(context: RunContext, iteration: int) -> Any:
            given = {"recipe": context.recipe.step_digest(), **inputs(context, iteration)}
            if context.journal.is_committed(iteration, name):
                record = _committed(context, iteration, name, given)
                progress.emit(progress.Event("cached", name, iteration))
                return Completed(name="Cached", message="committed before", data=asdict(record))
            progress.emit(progress.Event("step", name, iteration))
            faults.point(f"step:{name}:{iteration}")
            started = time.perf_counter()
            limit = context.recipe.step_timeout_s
            try:
                files, fields = await asyncio.wait_for(work(context, iteration), limit)
            except TimeoutError as error:
                if str(error):
                    raise  # a shorter limit inside, which says itself what it was
                raise TimeoutError(
                    f"step {name} of iteration {iteration} took longer than step_timeout_s={limit:g}"
                ) from None
            seconds = time.perf_counter() - started
            written = fields.pop("written", ())  # files of the run folder that are there already
            record = StepRecord(name, iteration, seconds, inputs=given, **fields)
            record = context.journal.commit(record, files, written)
            shown = {key: round(value, 4) for key, value in record.metrics.items()}
            get_run_logger().info("%s %d: %.2f s %s", name, iteration, record.seconds, shown or "")
            return asdict(record)

        async def call(context: RunContext, iteration: int) -> dict[str, Any]:
            run = with_retries(run_step, context)
            state = await run(context, iteration, return_state=True)
            record: dict[str, Any] = await state.aresult()
            return record

        call.__doc__ = work.__doc__
        call.__name__ = name
        call.work = work  # type: ignore[attr-defined]
        return call

    return wrap


def _committed(context: RunContext, iteration: int, name: str, given: dict[str, Any]) -> StepRecord:
    """The committed record; raises JournalError where it came from other inputs than those of now."""
    record = context.journal.whole(iteration, name)
    if record.inputs != given:
        keys = sorted(k for k in {*given, *record.inputs} if record.inputs.get(k) != given.get(k))
        raise JournalError(
            f"step {name} of iteration {iteration} was committed from other inputs than those that "
            f"are there now ({', '.join(keys)}). `fp8rl resume {context.run} --from-step "
            f"{name}@{iteration}` does it again, and all that came after it"
        )
    return record


def with_retries(run_step: Any, context: RunContext) -> Any:
    """The Prefect task `run_step` with the recipe's retries, for causes that can pass."""
    retry = context.recipe.retry

    # Prefect takes plain functions only, and the state's data is the exception itself.
    def condition(task: Any, task_run: Any, state: Any) -> bool:
        return _is_worth_a_retry(context, task_run.name, state.data)

    return run_step.with_options(
        retries=retry.attempts,
        retry_delay_seconds=[retry.delay_s * 4**i for i in range(retry.attempts)],
        retry_condition_fn=condition,
    )


def _is_worth_a_retry(context: RunContext, name: str, error: BaseException) -> bool:
    cause = cause_of(error)
    retry = context.recipe.retry
    used = _retries.get(context.run, 0)
    if cause is Cause.OUT_OF_MEMORY and not _can_do_with_less(context, name):
        cause = Cause.PERMANENT
    if not cause.can_pass or used >= retry.budget:
        why = cause if not cause.can_pass else f"the budget of {retry.budget} retries is used up"
        progress.emit(progress.Event("note", f"{name} failed ({why}): {error}"))
        return False
    _retries[context.run] = used + 1
    progress.emit(
        progress.Event("note", f"{name} failed ({cause}): {first_line(error)}; it is tried again")
    )
    return True


def _can_do_with_less(context: RunContext, name: str) -> bool:
    """Marks the run as out of memory; False where that happened before, or changes nothing."""
    if not name.startswith("train-") or not context.recipe.retry.smaller_micro_batch:
        return False
    if context.run in _out_of_memory or context.recipe.learner.micro_batch == 1:
        return False
    _out_of_memory.add(context.run)
    return True
