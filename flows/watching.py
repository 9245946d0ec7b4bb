"""`fp8rl watch`: a run that another process trains, looked at through its folder."""

import time
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from flows.live_view import KEPT, iterations_table
from fp8rl import guard
from fp8rl.glance import line, trends
from fp8rl.journal import JournalError, StepRecord
from fp8rl.runs import Run


def watch(run: Run, console: Console, *, every: float, once: bool) -> None:
    """Shows the run until it is over. every: seconds between two looks. once: one look only.

    In a terminal it redraws; elsewhere it prints a line for each new iteration. Raises JournalError for
    a record that stays damaged, IdentityError for a damaged run.
    """
    if once or not console.is_terminal:
        _follow(run, console, every, once)
        return
    with Live(_drawn(run, _records(run)), console=console, auto_refresh=False) as live:
        while not run.state().is_over:
            time.sleep(every)
            live.update(_drawn(run, _records(run)), refresh=True)


def _follow(run: Run, console: Console, every: float, once: bool) -> None:
    shown = -1
    while True:
        over = run.state().is_over  # before the look: what it did last is shown too
        records = _records(run)
        if once:
            console.print(_drawn(run, records))
            return
        for record in records:
            if record.iteration > shown:
                text = line(record.iteration, record.metrics)
                console.print(text, soft_wrap=True, highlight=False)
                shown = record.iteration
        if over:
            console.print(_state(run), soft_wrap=True)
            return
        time.sleep(every)


def _records(run: Run) -> list[StepRecord]:
    try:
        return run.journal.iterations()
    except JournalError:  # taken back by a resume while it was read
        time.sleep(0.2)
        return run.journal.iterations()


def _state(run: Run) -> Text:
    state = run.state()
    why = f" ({state.reason})" if state.reason else ""
    text = f"{run.name}: {state.state}{why}; last committed: {run.last_step()}"
    command = run.resume_command() if state.is_over else ""
    return Text(text + (f"; to carry on: {command}" if command else ""))


def _drawn(run: Run, records: list[StepRecord]) -> Group:
    total = run.recipe.iterations
    title = f"{run.name}: iteration {records[-1].iteration if records else 0} of {total}"
    table = iterations_table(title, ((r.iteration, r.metrics) for r in records[-KEPT:]))
    lines = [Text(f"{what:<9} {bars}  {ends}") for what, bars, ends in trends(records)]
    lines += [Text(left)] if (left := _left(records, total)) else []
    return Group(_state(run), table, *lines, *_guard_lines(run, records))


def _left(records: list[StepRecord], total: int) -> str:
    """What the iterations that are left will take, by the last ones; empty where nothing says so."""
    seconds = [r.metrics["timing/iteration_s"] for r in records if "timing/iteration_s" in r.metrics]
    if not seconds or records[-1].iteration >= total:
        return ""
    last = seconds[-KEPT:]
    rest = timedelta(seconds=round(sum(last) / len(last) * (total - records[-1].iteration)))
    return f"at this pace {rest} for the iterations that are left, evaluations aside"


def _guard_lines(run: Run, records: list[StepRecord]) -> list[Text]:
    found = []
    for record in records[-KEPT:]:
        firings = guard.decision(run.journal, record.iteration).get("firings", [])
        found += [Text(f"guard, iteration {record.iteration}: {guard.describe(f)}") for f in firings]
    return found
