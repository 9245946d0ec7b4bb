"""Stops in good order between iterations: where the recipe says so, and where the guard does."""

import time

from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import apause_flow_run
from prefect.runtime import flow_run

from flows.opening import Opened
from fp8rl import guard, progress
from fp8rl.context import RunContext
from fp8rl.journal import StepRecord
from fp8rl.recipe.guard import Action
from fp8rl.rewind import GUARD_ANSWER
from tasks.checkpoint import finish_checkpoint, is_checkpointed, start_checkpoint

# How often a paused run looks whether it was resumed.
_POLL_S = 2


class StopInOrder(Exception):
    """The run is to stop here, checkpointed; the text says why. without: the override that a resume
    needs, so that it does not stop again at once.
    """

    def __init__(self, reason: str, without: str = "") -> None:
        super().__init__(reason)
        self.without = without


async def stop_if_asked(context: RunContext, number: int, began: float, slowest: float) -> None:
    """Stops before iteration `number` where recipe.stop says so; raises StopInOrder."""
    stop = context.recipe.stop
    reason, without = "", ""
    if stop.after_iteration is not None and number > stop.after_iteration:
        reason, without = f"stop.after_iteration={stop.after_iteration}", "stop.after_iteration=null"
    elif stop.time_limit_s is not None:
        # The slowest so far, and a quarter of it for the checkpoint and what was not seen yet.
        left = stop.time_limit_s - (time.time() - began)
        if left < 1.25 * slowest:
            reason = f"stop.time_limit_s={stop.time_limit_s:g}: {left:.0f} s are left"
    if reason:
        await last_checkpoint(context, number - 1)
        raise StopInOrder(f"stopped after iteration {number - 1} ({reason})", without)


def slowest_iteration(context: RunContext) -> float:
    """Seconds of the slowest iteration that earlier attempts made, with its evaluation."""
    records = [r.metrics for r in context.journal.iterations() if r.iteration > context.origin]
    names = ("timing/iteration_s", "timing/evaluate_s")
    return max((sum(m.get(name, 0.0) for name in names) for m in records), default=0.0)


async def last_checkpoint(context: RunContext, version: int) -> None:
    """Has a whole checkpoint of `version` on the disk, also where one was lost with its learner."""
    for _ in range(context.recipe.retry.attempts + 1):
        await finish_checkpoint(context, block=True)
        if version == context.origin or is_checkpointed(context, version):
            return
        await start_checkpoint(context, version)
    await finish_checkpoint(context, block=True)
    if not is_checkpointed(context, version):
        text = f"no checkpoint of version {version} could be written; a resume replays training"
        progress.emit(progress.Event("note", text))


async def heed_guard(context: RunContext, opened: Opened, number: int) -> None:
    """Pauses or stops before iteration `number` where the guard decided so in the one before it.

    Whoever resumes or retries the run, or resumes a paused one in the Prefect UI, has answered: that is
    recorded, and it goes on. Raises StopInOrder for a stop, for a pause that nobody ended in time, and
    for one that nobody could end since there is no page of the run.
    """
    last = number - 1
    actions = guard.actions_of(context.journal, last)
    if not actions & {Action.PAUSE, Action.STOP} or _is_answered(context, last):
        return
    if opened.was_asked(last):
        _answer(context, last, "the run was resumed")
        return
    await last_checkpoint(context, last)
    opened.run.update_attempt(opened.attempt, guard_asked=last)
    firings = guard.decision(context.journal, last)["firings"]
    reason = f"the guard, after iteration {last}: {'; '.join(map(guard.describe, firings))}"
    if Action.STOP in actions:
        raise StopInOrder(f"stopped by {reason}")
    page = flow_run.get_flow_run_ui_url()
    if not str(page).startswith("http"):  # the embedded server has no page of its own
        raise StopInOrder(f"paused by {reason}")
    limit = context.recipe.guard.pause_timeout_s
    text = f"paused by {reason}. Press Resume on {page} to go on; after {limit:g} s the run stops"
    progress.emit(progress.Event("note", text))
    try:
        await apause_flow_run(timeout=int(limit), poll_interval=_POLL_S, key=f"guard-{last}")
    except FlowPauseTimeout:
        raise StopInOrder(f"nobody resumed it within {limit:g} s: paused by {reason}") from None
    _answer(context, last, "Resume in Prefect")


def _is_answered(context: RunContext, iteration: int) -> bool:
    return context.journal.fault(iteration, GUARD_ANSWER) is None


def _answer(context: RunContext, iteration: int, how: str) -> None:
    record = StepRecord(GUARD_ANSWER, iteration, 0.0, output={"answer": how})
    context.journal.commit(record, {})
    text = f"going on after the guard's word on iteration {iteration}: {how}"
    progress.emit(progress.Event("note", text))
