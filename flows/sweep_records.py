"""What is shown of a sweep while it goes on: in MLflow, in Prefect, and to whoever listens.

runs/sweeps/<sweep>/state.json    how the last start of it ended, and its Prefect flow run
"""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect.artifacts import (
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)
from prefect.runtime import flow_run

from flows.automations import mark_crashed
from flows.showing import artifact_key
from fp8rl import progress
from fp8rl.files import from_sealed, to_sealed, write_atomic
from fp8rl.journal import ITERATION, StepRecord
from fp8rl.lock import LockedError, RunLock, read_owner
from fp8rl.recipe.schema import Recipe
from fp8rl.runs import State
from fp8rl.sweep.drive import Tally
from fp8rl.sweep.expand import Child
from fp8rl.sweep.look import ChildState, look
from fp8rl.sweep.plan import PLAN, SWEEP_TAG, SWEEPS, Plan, params_of, read_plan
from fp8rl.tracking import MLFLOW_STATUS, Tracker
from fp8rl.tracking_server import page

# Between two updates of the tables where nothing but iterations was made.
_EVERY_S = 15.0


def row_of(child: Child, state: ChildState) -> dict[str, Any]:
    """A child as a row of a table."""
    return {
        **{"child": child.name, "arm": child.arm, "seed": child.seed, **child.values},
        **{"state": state.state, "iteration": state.iteration, "of": child.recipe.iterations},
        **{"accuracy": state.accuracy, "mismatch": state.mismatch, "reason": state.reason},
        "mlflow_run": state.mlflow_run,
    }


class SweepRecords:
    """The records of one start of the sweep `plan`."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._total = plan, plan.loaded.iterations
        self._tracker = _tracker(plan.folder, {"prefect.flow_run_id": str(flow_run.get_id())})
        self._shown: list[dict[str, Any]] = []
        self._children: list[Child] = []
        self._at = 0.0
        self._bar: Any = None

    async def begin(self) -> dict[str, str]:
        """Starts them; returns the tags of the children's MLflow runs. Raises TrackingError."""
        folder = self._plan.folder
        before = _read_state(folder)
        if before.get("flow_run") not in (None, str(flow_run.get_id())):
            await mark_crashed(before["flow_run"], "fp8rl: its process is gone; another one carries on")
        self._tracker.start(may_be_away=before != {})
        _write_state(folder, State("running"), str(flow_run.get_id()))
        key = artifact_key(f"sweep-{self._plan.name}", "progress")
        self._bar = await acreate_progress_artifact(progress=0.0, key=key, description=self._plan.name)
        return self._plan.tags(self._tracker.run_id)

    async def tell(self, tally: Tally, children: list[Child]) -> None:
        """Shows how far the children are, where that has changed."""
        rows = [row_of(child, tally.states[child.name]) for child in children]
        states = [row["state"] for row in rows]
        same = rows == self._shown
        if same or (
            states == [row["state"] for row in self._shown] and time.time() - self._at < _EVERY_S
        ):
            return
        self._children, self._at = children, time.time()
        done = sum(row["iteration"] for row in rows)
        self._note_points(tally, done)
        text = self._show(rows)
        await acreate_table_artifact(
            [_linked(row, self._tracker.uri) for row in rows],
            key=artifact_key(f"sweep-{self._plan.name}", "children"),
            description=f"Sweep {self._plan.name}: {text}",
        )
        await aupdate_progress_artifact(self._bar, progress=min(100.0, 100.0 * done / self._total))

    def _show(self, rows: list[dict[str, Any]]) -> str:
        """Shows the rows to listeners and in MLflow; returns in words how many are over."""
        self._shown = rows
        over = sum(row["state"] in ("finished", "stopped") for row in rows)
        text = f"{over} of {self._plan.loaded.count} children are over"
        done = sum(row["iteration"] for row in rows)
        progress.emit(progress.Event("sweep", text, done=done, total=self._total, table=tuple(rows)))
        columns = {name: [row.get(name) for row in rows] for name in _columns(rows)}
        self._tracker.put_table("children.json", columns)
        self._tracker.flush()
        return text

    def _note_points(self, tally: Tally, iterations: int) -> None:
        """A point for MLflow where more children are over than at the last one. Points are kept, since
        MLflow cannot take one back."""
        points, over = _points(self._plan.folder), tally.count("finished", "stopped")
        if over > (points[-1]["over"] if points else 0):
            metrics = {
                "sweep/finished": tally.count("finished"),
                "sweep/stopped": tally.count("stopped"),
                "sweep/failed": tally.count("failed", "killed"),
                "sweep/iterations": iterations,
            }
            points.append({"over": over, "t_ms": int(time.time() * 1000), "metrics": metrics})
            write_atomic(self._plan.folder / "history.json", to_sealed({"points": points}))

    def _show_the_end(self) -> None:
        """Children that were running when the sweep was told to end have ended since."""
        if any(row["state"] == "running" for row in self._shown):
            pairs = zip(self._shown, self._children, strict=True)
            self._show([row if row["state"] != "running" else self._now(c) for row, c in pairs])

    def _now(self, child: Child) -> dict[str, Any]:
        return row_of(child, look(self._plan, child))

    def put_summary(self, summary: dict[str, Any]) -> None:
        self._tracker.put_json("summary.json", summary)
        write_atomic(self._plan.folder / "summary.json", to_sealed(summary))

    def end(self, ends: State) -> None:
        """Says how the sweep ended. Never raises: what ended it is what the user is to see."""
        try:
            _write_state(self._plan.folder, ends, str(flow_run.get_id()))
            self._show_the_end()
            self._tracker.set_status(MLFLOW_STATUS[ends.state], ends.reason or None)
            self._tracker.flush()
        except Exception as error:
            text = f"the end of the sweep ({ends.state}) is not recorded everywhere: {error}"
            progress.emit(progress.Event("note", f"{text}. `fp8rl reap` puts that right"))


async def put_sweeps_right(runs: Path) -> list[str]:
    """Puts the records of sweeps right whose process is gone without a word; in words what was done."""
    done = []
    for path in (runs / SWEEPS).glob("*/state.json"):
        folder, state = path.parent, _read_state(path.parent)
        owner = read_owner(folder)
        if state.get("state") != "running" or (owner is not None and owner.is_alive()):
            continue
        with suppress(LockedError):
            lock = RunLock(folder)
            try:
                ends = State("killed", "its process is gone without a word")
                tracker = _tracker(folder, {}, create=False)
                tracker.set_status(MLFLOW_STATUS[ends.state], ends.reason)
                tracker.flush()
                await mark_crashed(state["flow_run"], f"fp8rl: {ends.reason}")
                _write_state(folder, ends, state["flow_run"])
                done.append(f"sweep {folder.name} was killed; start it again to carry it on")
            finally:
                lock.release()
    return done


def _tracker(folder: Path, tags: dict[str, str], create: bool = True) -> Tracker:
    values = read_plan(folder)
    assert values is not None
    return Tracker(
        Recipe.model_validate(values["children"][0]["recipe"]).model_copy(
            update={"runs_dir": str(folder.parent.parent)}
        ),
        run=folder.name,
        run_id=values["id"],
        folder=folder,
        records=lambda: _records(folder),
        tags={SWEEP_TAG: folder.name, **tags},
        create=create,
        params=params_of(values),
        document=(PLAN, (folder / PLAN).read_text()),
    )


def _points(folder: Path) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = from_sealed((folder / "history.json").read_bytes())["points"]
    except (FileNotFoundError, ValueError):
        return []
    return found


def _records(folder: Path) -> list[StepRecord]:
    """The points as records, which is what the tracker pushes."""
    return [
        StepRecord(ITERATION, point["over"], 0.0, metrics=point["metrics"], t_ms=point["t_ms"])
        for point in _points(folder)
    ]


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        return from_sealed((folder / "state.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return {}


def _write_state(folder: Path, state: State, flow_run_id: str) -> None:
    values = {"state": state.state, "reason": state.reason, "flow_run": flow_run_id}
    write_atomic(folder / "state.json", to_sealed(values))


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _linked(row: dict[str, Any], uri: str) -> dict[str, str]:
    """A row as Prefect's page shows it, with a link to MLflow's where it has one."""
    shown = {key: "" if value is None else str(value) for key, value in row.items()}
    for key, fmt in (("accuracy", "{:.1%}"), ("mismatch", "{:.4f}")):
        if row[key] is not None:
            shown[key] = fmt.format(row[key])
    run = row["mlflow_run"]
    if run and (address := page(uri, f"runs/{run}")):
        shown["mlflow_run"] = f"[{run}]({address})"
    return shown
