"""What MLflow and Prefect are told of a sweep. MLflow is a real one on SQLite; of Prefect the calls are
kept here, and tests/pipeline/test_sweep.py has the real one."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from flows import sweep_records
from flows.sweep_records import SweepRecords, put_sweeps_right
from fp8rl import progress
from fp8rl.lock import RunLock
from fp8rl.runs import Run, State
from fp8rl.sweep.drive import Drive, Tally
from fp8rl.sweep.look import ChildState, look
from fp8rl.sweep.plan import PARENT_TAG, Plan
from fp8rl.sweep.study import source_of
from fp8rl.tracking import tracking_uri
from fp8rl.tracking_server import Server
from tests.sweeps import Training, plan_of


class Prefect:
    """Keeps what it is told. flow_run: the id of the flow run that seems to go on."""

    def __init__(self) -> None:
        self.flow_run = "flow-1"
        self.tables: list[list[dict]] = []
        self.progress: list[float] = []
        self.crashed: list[str] = []

    async def table(self, rows, **_) -> None:
        self.tables.append(rows)

    async def bar(self, **_) -> str:
        return "bar"

    async def update(self, _, progress) -> None:
        self.progress.append(progress)

    async def crash(self, flow_run, _) -> None:
        self.crashed.append(flow_run)


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """An MLflow database with nothing in it, made once."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    with Server(f"sqlite:///{path}").reached():
        return path


@pytest.fixture
def prefect(monkeypatch, tmp_path, database):
    shutil.copyfile(database, tmp_path / "mlflow.db")
    told = Prefect()
    for name, call in (
        ("acreate_table_artifact", told.table),
        ("acreate_progress_artifact", told.bar),
        ("aupdate_progress_artifact", told.update),
        ("mark_crashed", told.crash),
    ):
        monkeypatch.setattr(sweep_records, name, call)
    monkeypatch.setattr(sweep_records.flow_run, "get_id", lambda: told.flow_run, raising=False)
    return told


def run(plan: Plan, training: Training) -> None:
    """One start of the sweep with its records."""
    source = source_of(plan)
    records = SweepRecords(plan)

    async def both() -> None:
        tags = await records.begin()
        assert tags[PARENT_TAG]
        driving = Drive(
            plan.loaded.sweep,
            source,
            look=lambda child: look(plan, child),
            launch=training.launch,
            tell=lambda tally: records.tell(tally, source.known()),
            poll_s=0.01,
        )
        await driving.run()

    asyncio.run(both())
    records.end(State("finished"))


def mlflow_run(plan: Plan):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri(plan.loaded.children[0].recipe))
    (experiment,) = (e for e in client.search_experiments() if e.name == "fp8rl")
    (found,) = client.search_runs([experiment.experiment_id])
    return client, found


def test_mlflow_and_prefect_are_told_of_each_child(tmp_path: Path, prefect):
    plan = plan_of(tmp_path, seeds=[0, 1])
    events: list[progress.Event] = []
    with progress.listening(events.append):
        run(plan, Training(plan, {"s-bf16-s1": [("failed", 2)]}))
    client, found = mlflow_run(plan)
    assert found.info.run_name == "s"
    assert found.info.status == "FINISHED"
    assert (found.data.params["seeds"], found.data.params["overrides.iterations"]) == ("[0, 1]", "4")
    assert found.data.metrics == {
        "sweep/finished": 1,
        "sweep/stopped": 0,
        "sweep/failed": 0,
        "sweep/iterations": 4,
    }
    path = client.download_artifacts(found.info.run_id, "children.json", str(tmp_path))
    table = json.loads(Path(path).read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [(row["child"], row["state"], row["iteration"], row["accuracy"]) for row in rows] == [
        ("s-bf16-s0", "finished", 4, 0.5),
        ("s-bf16-s1", "failed", 2, 0.5),
    ]
    assert rows[1]["reason"] == "failed here"
    assert prefect.tables[-1][0]["accuracy"] == "50.0%"
    assert prefect.tables[0][0]["state"] == "waiting"
    assert prefect.progress[-1] == 75.0
    assert (events[-1].kind, events[-1].done, events[-1].total) == ("sweep", 6, 8)

    # The next start is another flow run, with the same MLflow run, and one more point.
    prefect.flow_run = "flow-2"
    run(plan, Training(plan))
    assert prefect.crashed == ["flow-1"]
    client, again = mlflow_run(plan)
    assert again.info.run_id == found.info.run_id
    points = client.get_metric_history(again.info.run_id, "sweep/finished")
    assert [(point.step, point.value) for point in points] == [(1, 1), (2, 2)]


def test_children_that_are_told_to_end_with_the_sweep_are_shown_as_they_ended(tmp_path, prefect):
    plan = plan_of(tmp_path, seeds=[0, 1])
    training = Training(plan, {"s-bf16-s0": [("cancelled", 2)]})
    records = SweepRecords(plan)
    first, second = plan.loaded.children

    async def both() -> None:
        await records.begin()
        tally = Tally({first.name: ChildState("running"), second.name: ChildState("waiting")})
        await records.tell(tally, [first, second])
        await training.launch(first, tally.states[first.name])

    asyncio.run(both())
    events: list[progress.Event] = []
    with progress.listening(events.append):
        records.end(State("cancelled", "told to end"))
    assert [row["state"] for row in events[-1].table] == ["cancelled", "waiting"]
    assert mlflow_run(plan)[1].info.status == "KILLED"


def test_a_sweep_that_was_killed_is_put_right(tmp_path: Path, prefect):
    plan = plan_of(tmp_path, seeds=[0])
    lock = RunLock(plan.folder)
    records = SweepRecords(plan)
    asyncio.run(records.begin())
    assert asyncio.run(put_sweeps_right(tmp_path)) == []  # it goes on
    assert mlflow_run(plan)[1].info.status == "RUNNING"
    lock.release()
    assert asyncio.run(put_sweeps_right(tmp_path)) == [
        "sweep s was killed; start it again to carry it on"
    ]
    assert mlflow_run(plan)[1].info.status == "KILLED"
    assert prefect.crashed == ["flow-1"]
    assert asyncio.run(put_sweeps_right(tmp_path)) == []
    assert not Run(tmp_path / "s-bf16-s0").folder.exists()
