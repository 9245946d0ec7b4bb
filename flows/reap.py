"""Putting right what processes that were killed left behind: records, MLflow, Prefect, servers."""

import time
from pathlib import Path

from flows.automations import mark_crashed
from flows.sweep_records import put_sweeps_right
from fp8rl import progress
from fp8rl.lock import LockedError, RunLock
from fp8rl.runs import Run, State, all_runs, remove_unborn
from fp8rl.tracking import MLFLOW_STATUS, Tracker


async def put_right(runs: Path, but: str | None = None) -> list[str]:
    """Puts right every run in the runs folder whose process is gone; returns what was done, in words.

    Its last attempt is recorded as killed, its MLflow run ended with what was committed, its Prefect
    flow run marked as crashed. Actors end with their process, or with Ray. Runs that ended while MLflow
    was away get their metrics there now. but: name of a run to leave alone.
    """
    remove_unborn(runs)
    done = []
    for run in all_runs(runs):
        if run.name == but:
            continue
        try:
            done += await put_run_right(run)
        except Exception as error:  # what is wrong with one run must not stop another one
            done.append(f"run {run.name} could not be put right: {error}")
    try:
        done += await put_sweeps_right(runs)
    except Exception as error:
        done.append(f"the sweeps could not be put right: {error}")
    for line in done:
        progress.emit(progress.Event("note", line))
    return done


async def put_run_right(run: Run) -> list[str]:
    """As `put_right`, for one run."""
    found = run.state()  # before this process takes the lock, and the run would seem to be running
    if not found.is_over or not run.attempts():
        return []
    if not run.is_dead_without_a_word() and not _waits(_tracker(run)):
        return []
    try:
        lock = RunLock(run.folder)
    except LockedError:
        return []
    try:
        return await _put_right(run, found)
    finally:
        lock.release()


async def _put_right(run: Run, found: State) -> list[str]:
    done = []
    last = run.attempts()[-1]
    state = found if last["state"] == "running" else State(last["state"], last.get("reason", ""))
    if last["state"] == "running":
        run.end_attempt(last["number"], state)
        done.append(f"run {run.name} was killed ({state.reason}), after {run.last_step()}")
        if await mark_crashed(last["prefect_flow_run"], f"fp8rl: {state.reason}"):
            done.append(f"  its Prefect flow run {last['prefect_flow_run']} is marked as crashed")
    tracker = _tracker(run)
    if tracker.run_id is not None:
        ended_ms = int(last.get("ended", time.time()) * 1000)
        tracker.set_status(MLFLOW_STATUS[state.state], state.reason or None, ended_ms)
        told = tracker.flush()
        done.append(f"  MLflow: run {run.name} {'is up to date' if told else 'waits for the server'}")
    return done


def _tracker(run: Run) -> Tracker:
    """Keeps the run's MLflow run up to date, and makes none."""
    return Tracker(
        run.recipe,
        run=run.name,
        run_id=run.id,
        folder=run.folder,
        records=run.journal.iterations,
        tags={},
        create=False,
    )


def _waits(tracker: Tracker) -> bool:
    return tracker.run_id is not None and bool(tracker.pending())
