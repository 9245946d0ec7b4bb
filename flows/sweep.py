"""A sweep: the training runs of a sweep file, one after another, each an ordinary run of its own.

The same flow begins a sweep, carries one on, and is what a retry in the Prefect UI runs again: children
that are over are taken as they are, and the others are begun or carried on.
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.logging import get_run_logger
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled

from flows.asked import OptionalText, Overrides
from flows.environment import set_quiet
from flows.sweep_children import (
    DeploymentRuns,
    Processes,
    environment_of_children,
    require_deployment,
)
from flows.sweep_records import SweepRecords, row_of
from fp8rl.lock import RunLock
from fp8rl.runs import State, remove_unborn
from fp8rl.sweep.check import checked_sweep
from fp8rl.sweep.drive import Drive, Tally
from fp8rl.sweep.look import look
from fp8rl.sweep.plan import Plan, open_plan
from fp8rl.sweep.study import StudySource, source_of


class SweepFailedError(RuntimeError):
    """Children of the sweep failed. All records are made; a start of the sweep carries them on."""


def _flow_run_name() -> str:
    return Path(str(flow_run.get_parameters().get("file") or "sweep")).stem


@flow(name="sweep", flow_run_name=_flow_run_name)
async def sweep(
    file: str,
    overrides: Overrides = [],  # noqa: B006  never changed
    runs_dir: OptionalText = "",
) -> Any:
    """Trains the children of the sweep in `file`; returns what became of them.

    A sweep that ran out of its budget, or whose children were cancelled, ends as Cancelled; a start or
    Retry goes on with it. Raises RecipeError, SweepChangedError, RunExistsError or LockedError before
    anything starts, and SweepFailedError at the end where children failed.

    Args:
        file: The sweep file: its path from the folder that was deployed, or a whole one.
        overrides: Values of the sweep file to change, one in each item, as key=value: seeds=[0],
            budget.hours=2.
        runs_dir: Where runs are kept. Empty: where the sweep file says.
    """
    set_quiet()  # a worker starts this flow without the command
    flow_run_id = str(flow_run.get_id())
    place = [f"runs_dir={json.dumps(runs_dir)}"] if runs_dir else []
    loaded, draft = checked_sweep(Path(file), [*place, *(overrides or [])], flow_run_id)
    if is_deployed := deployment.get_id() is not None:
        await require_deployment()
    remove_unborn(draft.runs)
    draft.folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock(draft.folder)
    with ExitStack() as at_the_end:
        at_the_end.callback(lock.release)
        plan = open_plan(loaded, flow_run_id)
        records = SweepRecords(plan)
        ends = State("failed", "the process ended before it could say why")
        at_the_end.callback(lambda: records.end(ends))
        try:
            tags = await records.begin()
            if is_deployed:
                children: Processes | DeploymentRuns = DeploymentRuns(plan, tags)
            else:
                children = Processes(plan, tags, await environment_of_children())
            at_the_end.callback(children.stop)
            tally, summary = await _drive(plan, children, records)
        except BaseException as error:
            own = isinstance(error, Exception)
            ends = State("failed" if own else "cancelled", f"{type(error).__name__}: {error}")
            raise
        ends = _ends(tally)
        records.put_summary(summary)
        get_run_logger().info("sweep %s %s %s", plan.name, ends.state, ends.reason)
        if ends.state == "failed":
            raise SweepFailedError(f"{ends.reason}. Start the sweep again, or Retry, to carry them on")
        if ends.state == "stopped":
            return Cancelled(name="Stopped", message=ends.reason)
        return summary


async def _drive(
    plan: Plan, children: Processes | DeploymentRuns, records: SweepRecords
) -> tuple[Tally, dict[str, Any]]:
    source = source_of(plan)
    retry = plan.loaded.sweep.failures.retry
    driving = Drive(
        plan.loaded.sweep,
        source,
        # One that failed in this start is not tried again in it: the source gives each once.
        look=lambda child: look(plan, child, retry=retry),
        launch=children.launch,
        tell=lambda tally: records.tell(tally, source.known()),
    )
    tally = await driving.run()
    rows = [row_of(child, tally.states[child.name]) for child in source.known()]
    summary: dict[str, Any] = {"sweep": plan.name, "stopped": tally.stopped, "children": rows}
    if isinstance(source, StudySource):
        summary["best"] = source.best()
    return tally, summary


def _ends(tally: Tally) -> State:
    if tally.failed:
        first = tally.failed[0]
        text = f"{len(tally.failed)} of {len(tally.states)} children failed: {', '.join(tally.failed)}"
        why = f"{first}: {tally.states[first].reason}"
        return State("failed", ". ".join(part for part in (text, why, tally.stopped) if part))
    if tally.stopped or tally.open:
        skipped = tally.count("skipped") + tally.unmade
        open_ = [name for name in tally.open if tally.states[name].state != "skipped"]
        parts = [tally.stopped, f"{skipped} children were skipped" if skipped else ""]
        parts += [f"not finished: {', '.join(open_)}" if open_ else ""]
        return State("stopped", "; ".join(part for part in parts if part))
    return State("finished")
