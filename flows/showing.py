"""Shows what an iteration came to: what its guard decided in notes, Prefect events and an artifact; KV
scales, answers and worst samples as tables and plots in MLflow."""

import re
import uuid
from typing import Any

from prefect.artifacts import acreate_table_artifact
from prefect.events import emit_event
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from fp8rl import guard, progress
from fp8rl.context import RunContext
from fp8rl.kv_history import kv_history, plot_kv_history
from fp8rl.recipe.guard import Action
from fp8rl.samples import BF16_FILE, evaluation_table
from fp8rl.tracking import Tracker
from fp8rl.worst_samples import plot_worst, read_worst, worst_table

EVENT = "fp8rl.guard.fired"


def artifact_key(*parts: str) -> str:
    """Prefect's artifact keys know lower-case ASCII letters, digits and dashes only."""
    return re.sub(r"[^a-z0-9]", "-", "-".join(parts).lower()).strip("-")


def short(value: Any) -> str:
    """`value` as text for a table; a fraction with five digits."""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


async def show_guard(context: RunContext, tracker: Tracker, number: int, key: str) -> None:
    """Tells of the firings in iteration `number`, if there are any. key: of the Prefect artifact."""
    found = guard.decision(context.journal, number)
    if not found.get("firings"):
        return
    _note(context, number, found)
    for firing in found["firings"]:
        _emit(context, number, firing)
    events = guard.events(context.journal)
    tracker.put_table("guard.json", events)
    rows = [dict(zip(events, row, strict=True)) for row in zip(*events.values(), strict=True)]
    await acreate_table_artifact(rows, key=key, description=f"What the guard of {context.run} did")


def _note(context: RunContext, number: int, found: dict[str, Any]) -> None:
    """In the terminal and the log; a warning that stood there the iteration before is not repeated."""
    before = {f["rule"] for f in guard.decision(context.journal, number - 1).get("firings", [])}
    new = [f for f in found["firings"] if f["rule"] not in before or f["actions"] != [Action.WARN]]
    if not new:
        return
    text = f"guard, iteration {number}: {'; '.join(map(guard.describe, new))}"
    if found["masked"]:
        text += f"; {found['masked']} sequences were not trained on"
    if found["skipped"]:
        text += "; the weights were left as they were"
    get_run_logger().warning(text)
    progress.emit(progress.Event("note", text))


def _emit(context: RunContext, number: int, firing: dict[str, Any]) -> None:
    """The event of one firing. Its id is a function of the firing, so that it is there once however
    often it is told."""
    run_id = context.journal.run_id
    emit_event(
        event=EVENT,
        resource={"prefect.resource.id": f"fp8rl.run.{run_id}", "prefect.resource.name": context.run},
        related=[
            {
                "prefect.resource.id": f"prefect.flow-run.{flow_run.get_id()}",
                "prefect.resource.role": "flow-run",
            }
        ],
        payload={"iteration": number, **firing},
        id=uuid.uuid5(uuid.UUID(run_id), f"{number} {firing['rule']}"),
    )


def _is_evaluated(context: RunContext, number: int) -> bool:
    return context.journal.is_committed(number, "evaluate")


def show_kv(context: RunContext, tracker: Tracker, number: int) -> None:
    """Has MLflow show the KV scales so far, where iteration `number` was evaluated."""
    if _is_evaluated(context, number):
        columns = kv_history(context.journal)
        if columns["version"]:  # else a BF16 cache
            tracker.put_table("kv_history.json", columns)
            tracker.put_bytes("kv_history.png", plot_kv_history(columns))


def show_evaluation(context: RunContext, tracker: Tracker, number: int) -> None:
    """Has MLflow show the answers of iteration `number`, where it was evaluated."""
    if _is_evaluated(context, number):
        tracker.put_table(f"evaluation/{number:05d}.json", evaluation_table(context.journal, number))
        if context.recipe.evaluate.bf16:
            table = evaluation_table(context.journal, number, BF16_FILE)
            tracker.put_table(f"evaluation_bf16/{number:05d}.json", table)


def show_worst(context: RunContext, tracker: Tracker, number: int) -> None:
    """Has MLflow show the worst samples of iteration `number`, where it was evaluated or the guard
    fired; those of every iteration stay in the journal."""
    fired = bool(guard.decision(context.journal, number).get("firings"))
    if number == context.origin or not (_is_evaluated(context, number) or fired):
        return
    columns = read_worst(context.journal, number)
    tracker.put_table(f"worst_samples/{number:05d}.json", worst_table(columns))
    tracker.put_bytes(f"worst_samples/{number:05d}.png", plot_worst(columns, number))
