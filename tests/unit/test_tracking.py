"""MLflow tracking through crashes and outages, with real SQLite files and a real server."""

import json
import math
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fp8rl import progress
from fp8rl.journal import StepRecord
from fp8rl.recipe.load import flatten
from fp8rl.recipe.schema import Recipe, Tracking
from fp8rl.tracking import Tracker, TrackingError
from fp8rl.tracking_server import Server, page, shown

ROOT = Path(__file__).parents[2]
T0 = 1_700_000_000_000


def recipe_of(folder, **changes):
    return Recipe(runs_dir=str(folder), **changes)


def records_of(folder):
    """Stands for the journal: records in one file."""
    path = folder / "records.json"
    return [StepRecord(**values) for values in json.loads(path.read_text())] if path.is_file() else []


def commit(folder, *numbers, later_ms=0, **metrics):
    """Commits iterations; `later_ms` makes it another time stamp, as doing an iteration again does."""
    records = records_of(folder)
    for n in numbers:
        values = {"train/loss": 1.0 / (n + 1), "val/accuracy": 0.1 * n, **metrics}
        records.append(
            StepRecord("iteration", n, seconds=1.0, metrics=values, t_ms=T0 + 1000 * n + later_ms)
        )
    (folder / "records.json").write_text(json.dumps([asdict(record) for record in records]))


def take_back(folder, to):
    """Forgets the iterations after `to`."""
    kept = [asdict(record) for record in records_of(folder) if record.iteration <= to]
    (folder / "records.json").write_text(json.dumps(kept))


def tracker_of(folder, recipe=None, tags=None):
    return Tracker(
        recipe or recipe_of(folder),
        run="a run",
        run_id="id-1",
        folder=folder / "a run",
        records=lambda: records_of(folder),
        tags={"fp8rl.arm": "demo"} if tags is None else tags,
    )


def client_of(tracker):
    with Server(tracker.uri).reached() as client:
        return client


def runs(tracker, view=1):
    """All MLflow runs of the experiment; view: 1 active, 2 deleted."""
    client = client_of(tracker)
    found = client.get_experiment_by_name("fp8rl")
    return [] if found is None else list(client.search_runs([found.experiment_id], run_view_type=view))


def only_run(tracker):
    (run,) = runs(tracker)
    return run


def points(tracker):
    """Every point of the only run: {(key, step): [(value, time stamp), ...]}."""
    client, run = client_of(tracker), only_run(tracker)
    found = {}
    for key in run.data.metrics:
        for point in client.get_metric_history(run.info.run_id, key):
            found.setdefault((key, point.step), []).append((point.value, point.timestamp))
    return found


def assert_each_point_once(tracker, folder):
    there = points(tracker)
    wanted = {
        (key, record.iteration): [(value, record.t_ms)]
        for record in records_of(folder)
        for key, value in record.metrics.items()
    }
    assert wanted
    # A NaN differs from itself.
    assert repr(sorted(there.items())) == repr(sorted(wanted.items()))


def artifact(tracker, name):
    path = client_of(tracker).download_artifacts(only_run(tracker).info.run_id, name)
    return Path(path).read_text()


def state(folder):
    return json.loads((folder / "a run" / "tracking" / "state.json").read_text())


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """An MLflow database, which takes seconds to make."""
    path = tmp_path_factory.mktemp("database") / "mlflow.db"
    with Server(f"sqlite:///{path}").reached():
        pass
    return path


@pytest.fixture
def folder(tmp_path, database):
    shutil.copy(database, tmp_path / "mlflow.db")
    return tmp_path


@pytest.fixture
def notes():
    heard = []
    with progress.listening(lambda event: heard.append(event.text)):
        yield heard


# A run without trouble.


def test_one_run_shows_what_the_folder_has(folder):
    tracker = tracker_of(folder)
    assert tracker.run_id is None
    commit(folder, 0, 1)
    tracker.start(may_be_away=False)
    tracker.put_json("backends.json", {"engine": "vllm"})
    tracker.put_text("notes/how.txt", "so")
    commit(folder, 2)
    assert "iterations 2 to 2" in tracker.pending()
    assert tracker.flush()
    assert tracker.pending() == ""
    tracker.set_status("FINISHED", ended_ms=T0)
    assert tracker.pending() == "status FINISHED"
    assert only_run(tracker).info.status == "RUNNING"
    assert tracker.flush()
    run = only_run(tracker)
    assert run.info.run_id == tracker.run_id == state(folder)["mlflow_run"]
    assert (run.info.run_name, run.info.status, run.info.end_time) == ("a run", "FINISHED", T0)
    assert run.data.params == flatten(recipe_of(folder))
    wanted = {"fp8rl.run": "a run", "fp8rl.run_id": "id-1", "fp8rl.arm": "demo"}
    assert wanted.items() <= run.data.tags.items()
    assert json.loads(artifact(tracker, "backends.json")) == {"engine": "vllm"}
    assert artifact(tracker, "notes/how.txt") == "so"
    assert "seed: 0" in artifact(tracker, "recipe.yaml")
    assert_each_point_once(tracker, folder)


PREPARED = {
    "train": {"prompts": 120, "fingerprint": "5e" * 32},
    "val": {"prompts": 64, "fingerprint": "bd" * 32},
    "sources": [{"source": "chain_sum", "items": 519}, {"source": "own.jsonl", "rows": 3}],
}


def test_prompts_are_shown_as_data_sets_once_each(folder):
    tracker = tracker_of(folder)
    tracker.start(may_be_away=False)
    tracker.put_inputs(PREPARED)
    assert tracker.pending() == ""
    (folder / "a run" / "tracking" / "state.json").unlink()  # all is pushed again
    again = tracker_of(folder)
    again.start(may_be_away=True)
    again.put_inputs(PREPARED)
    inputs = only_run(again).inputs.dataset_inputs
    found = {one.tags[0].value: one.dataset for one in inputs}
    assert sorted(found) == ["training", "validation"]
    assert len(inputs) == 2
    assert found["training"].name == "chain_sum + own.jsonl"
    assert found["training"].digest == PREPARED["train"]["fingerprint"][:36]
    assert json.loads(found["validation"].profile) == {"num_rows": 64}
    assert json.loads(artifact(again, "data.json")) == PREPARED


def test_the_machine_is_measured_while_the_run_goes_on(folder, monkeypatch):
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")

    def steps(tracker):
        name = "system/cpu_utilization_percentage"
        history = client_of(tracker).get_metric_history(tracker.run_id, name)
        return sorted(point.step for point in history)

    tracker = tracker_of(folder)
    tracker.start(may_be_away=False)
    with tracker.system_metrics():
        time.sleep(1.0)
    first = steps(tracker)
    assert first
    with tracker.system_metrics():  # a resume goes on
        time.sleep(1.0)
    assert len(steps(tracker)) == len(set(steps(tracker))) > len(first)
    off = tracker_of(folder, recipe_of(folder, tracking=Tracking(system_metrics=False)))
    off.start(may_be_away=True)
    before = steps(tracker)
    with off.system_metrics():
        time.sleep(0.5)
    assert steps(tracker) == before


def test_artifact_is_replaced(folder):
    tracker = tracker_of(folder)
    tracker.start(may_be_away=False)
    for number in (1, 2):
        tracker.put_json("summary.json", {"iterations": number})
    assert json.loads(artifact(tracker, "summary.json")) == {"iterations": 2}


def test_table_is_what_mlflow_shows_as_one_and_has_its_rows_once(folder):
    columns = {"name": ["a/b", "c"], "format": ["fp8", "bf16"], "error": [0.5, math.nan]}
    tracker = tracker_of(folder)
    tracker.start(may_be_away=False)
    for _ in range(2):
        tracker.put_table("precision.json", columns)
    resumed = tracker_of(folder)
    resumed.start(may_be_away=False)
    resumed.put_table("precision.json", columns)
    (folder / "a run" / "tracking" / "state.json").unlink()
    tracker_of(folder).start(may_be_away=False)
    mine, tag = artifact(tracker, "precision.json"), "mlflow.loggedArtifacts"
    shown_as = only_run(tracker).data.tags[tag]

    client = client_of(tracker)
    other = client.create_run(only_run(tracker).info.experiment_id).info.run_id
    client.log_table(other, columns, "precision.json")
    theirs = Path(client.download_artifacts(other, "precision.json")).read_text()
    assert json.loads(mine) == json.loads(theirs)
    assert json.loads(shown_as) == json.loads(client.get_run(other).data.tags[tag])


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", ".hidden", "a//b", "a\\b"])
def test_artifact_stays_in_its_folder(folder, name):
    with pytest.raises(ValueError, match="plain relative path"):
        tracker_of(folder).put_text(name, "x")


def test_refused_arguments(folder):
    tracker = tracker_of(folder)
    with pytest.raises(ValueError, match="known: RUNNING, FINISHED"):
        tracker.set_status("DONE")
    with pytest.raises(ValueError, match=r"\.json"):
        tracker.put_table("table.csv", {})
    with pytest.raises(ValueError, match="shorter"):
        tracker.put_table("table.json", {"a": [1, 2], "b": [1]})
    with pytest.raises(ValueError, match="quote"):
        Tracker(recipe_of(folder), run="r", run_id="a'b", folder=folder, records=list, tags={})


def test_making_a_tracker_needs_no_mlflow(folder):
    code = (
        "import sys; from pathlib import Path; from tests.unit.test_tracking import *; "
        "import fp8rl.tracking; tracker_of(Path(sys.argv[1])).pending(); "
        "assert not {'mlflow', 'requests', 'sqlalchemy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, cwd=ROOT)


def test_password_is_not_shown():
    assert shown("https://me:secret@host:5000/x") == "https://me:***@host:5000/x"
    assert shown("http://host:5000") == "http://host:5000"


# Values.


def test_infinite_metric_gets_no_point_and_is_named_and_training_goes_on(folder):
    tracker = tracker_of(folder)
    tracker.start(may_be_away=False)
    commit(folder, 0)
    commit(folder, 1, **{"mismatch/kl": math.inf, "mismatch/low": -math.inf})
    commit(folder, 2)
    assert tracker.flush()
    found = points(tracker)
    assert {step for _, step in found} == {0, 1, 2}
    assert not {name for name, _ in found} & {"mismatch/kl", "mismatch/low"}
    tags = only_run(tracker).data.tags
    assert tags["fp8rl.infinite.00001"] == "mismatch/kl, mismatch/low"
    assert "fp8rl.infinite.00002" not in tags


def test_what_mlflow_refuses_is_an_error(folder):
    from mlflow.exceptions import MlflowException

    tracker = tracker_of(folder)
    tracker.start(may_be_away=False)
    commit(folder, 0, **{"pass@1": 1.0})
    with pytest.raises(MlflowException, match="pass@1"):
        tracker.flush()


def test_lost_state_pushes_all_again_and_adds_no_point(folder):
    """Also of a NaN, which differs from itself."""
    tracker = tracker_of(folder)
    commit(folder, 0, 1, **{"mismatch/nan": math.nan, "m/third": 1 / 3})
    tracker.start(may_be_away=False)
    for lost in (None, "{ half", '{"unknown": 1}'):
        path = folder / "a run" / "tracking" / "state.json"
        if lost is None:
            path.unlink()
        else:
            path.write_text(lost)
        again = tracker_of(folder)
        assert "iterations 0 to 1" in again.pending()
        again.start(may_be_away=False)
        assert again.pending() == ""
        assert again.run_id == tracker.run_id
    assert_each_point_once(tracker, folder)


# Resuming.


def test_resumed_run_runs_again(folder):
    first = tracker_of(folder)
    first.start(may_be_away=False)
    first.set_status("KILLED", "cancelled by the user")
    first.flush()
    assert only_run(first).info.end_time
    assert only_run(first).data.tags["fp8rl.reason"] == "cancelled by the user"
    resumed = tracker_of(folder, tags={"fp8rl.arm": "demo", "prefect.flow_run_id": "2"})
    resumed.start(may_be_away=False)
    run = only_run(first)
    assert (run.info.status, run.info.end_time or None) == ("RUNNING", None)
    assert "fp8rl.reason" not in run.data.tags
    assert run.data.tags["prefect.flow_run_id"] == "2"
    assert "fp8rl.recipe_drift" not in run.data.tags


def test_resumed_run_runs_again_where_a_person_ended_it(folder):
    first = tracker_of(folder)
    first.start(may_be_away=False)
    client_of(first).set_terminated(first.run_id, "KILLED")
    tracker_of(folder).start(may_be_away=False)
    assert only_run(first).info.status == "RUNNING"


def test_changed_recipe_is_a_tag(folder):
    tracker_of(folder).start(may_be_away=False)
    resumed = tracker_of(folder, recipe_of(folder, iterations=70, seed=3))
    resumed.start(may_be_away=False)
    run = only_run(resumed)
    assert run.data.params["iterations"] == "50"
    assert set(run.data.tags["fp8rl.recipe_drift"].splitlines()) == {
        "iterations: 50 -> 70",
        "seed: 0 -> 3",
    }
    assert "seed: 3" in artifact(resumed, "recipe.yaml")


def test_deleted_run_is_made_anew(folder):
    first = tracker_of(folder)
    commit(folder, 0, 1)
    first.start(may_be_away=False)
    client_of(first).delete_run(first.run_id)
    resumed = tracker_of(folder)
    resumed.start(may_be_away=False)
    assert resumed.run_id != first.run_id
    assert_each_point_once(resumed, folder)


# Kills, each in a process of its own.


def begin(folder):
    """The run of the kill tests, from wherever it was left to the end of its iterations."""
    tracker = tracker_of(folder)
    tracker.start(may_be_away=False)
    for n in range(len(records_of(folder)), 4):
        commit(folder, n)
        tracker.flush()
    tracker.set_status("FINISHED")
    tracker.flush()


def rebuild(folder):
    tracker = tracker_of(folder)
    if state(folder)["mlflow_run"]:
        tracker.rebuild()
    else:
        tracker.start(may_be_away=False)


def open_database(folder):
    with Server(tracker_of(folder).uri).reached():
        pass


def process(what, folder, fault=None, beside=None):
    """Runs the function `what` in a process, killed at `fault`; `beside`, another one meanwhile."""
    environment = dict(os.environ)
    if fault is not None:
        planted = [{"at": fault, "do": "kill", "once": str(folder / "once")}]
        environment["FP8RL_FAULTS"] = json.dumps(planted)
    started = []
    for name in filter(None, (what, beside)):
        code = f"import sys, pathlib; from tests.unit.test_tracking import {name} as work; "
        code += "work(pathlib.Path(sys.argv[1]))"
        command = [sys.executable, "-c", code, str(folder)]
        started.append(subprocess.Popen(command, env=environment, cwd=ROOT))
    for running in started:
        assert running.wait(120) == (0 if fault is None else -signal.SIGKILL)


def pushed_last(folder):
    return state(folder)["pushed"]["last"][0]


def test_killed_before_and_after_a_push(folder):
    for fault, last_noted, last_there in (
        ("tracking:1:before-push", 0, 0),
        ("tracking:2:after-push", 1, 2),  # so what is there is pushed again
    ):
        process("begin", folder, fault)
        (folder / "once").unlink()
        assert pushed_last(folder) == last_noted
        assert max(step for _, step in points(tracker_of(folder))) == last_there
    process("begin", folder)
    tracker = tracker_of(folder)
    assert pushed_last(folder) == 3
    assert_each_point_once(tracker, folder)
    assert only_run(tracker).info.status == "FINISHED"
    assert only_run(tracker).data.params == flatten(recipe_of(folder))


def test_killed_before_the_new_run_is_noted(folder):
    process("begin", folder, "tracking:created")
    assert state(folder)["mlflow_run"] is None
    created = only_run(tracker_of(folder)).info.run_id
    process("begin", folder)
    tracker = tracker_of(folder)
    assert only_run(tracker).info.run_id == tracker.run_id == created
    assert only_run(tracker).data.params == flatten(recipe_of(folder))
    assert_each_point_once(tracker, folder)


def test_killed_while_the_database_is_made(tmp_path):
    process("begin", tmp_path, "tracking:database")
    assert not (tmp_path / "mlflow.db").exists()
    (leftover,) = tmp_path.glob(".mlflow.db.new")
    leftover.write_bytes(leftover.read_bytes()[:200_000])  # as of a kill a second earlier
    process("begin", tmp_path, beside="open_database")
    assert_each_point_once(tracker_of(tmp_path), tmp_path)
    assert not list(tmp_path.glob(".mlflow.db.new*"))


# A run that was taken back.


def test_rebuilt_run_has_the_points_of_now(folder):
    old = tracker_of(folder)
    commit(folder, 0, 1, 2)
    old.start(may_be_away=False)
    old.put_json("data.json", [1])
    take_back(folder, to=0)
    tracker = tracker_of(folder)
    assert tracker.rebuild()
    tracker.start(may_be_away=False)
    commit(folder, 1, 2, 3, later_ms=5)
    tracker.flush()
    assert tracker.pending() == ""
    assert tracker.run_id != old.run_id
    assert_each_point_once(tracker, folder)
    assert json.loads(artifact(tracker, "data.json")) == [1]
    (deleted,) = runs(tracker, view=2)
    assert deleted.info.run_id == old.run_id
    assert deleted.info.status == "KILLED"
    assert deleted.data.tags["fp8rl.superseded_by"] == tracker.run_id


@pytest.mark.parametrize("done_again", [False, True])
def test_run_that_was_taken_back_unnoticed_is_rebuilt(folder, done_again):
    old = tracker_of(folder)
    commit(folder, 0, 1, 2)
    old.start(may_be_away=False)
    take_back(folder, to=0)
    commit(folder, *((1, 2) if done_again else (1,)), later_ms=5)
    tracker = tracker_of(folder)
    tracker.start(may_be_away=False)
    assert tracker.run_id != old.run_id
    assert_each_point_once(tracker, folder)


def test_rebuild_killed_in_between(folder):
    old = tracker_of(folder)
    commit(folder, 0, 1, 2)
    old.start(may_be_away=False)
    take_back(folder, to=0)
    commit(folder, 1, later_ms=5)
    process("rebuild", folder, "tracking:created")
    assert state(folder)["mlflow_run"] is None
    assert len(runs(old)) == 2
    (folder / "once").unlink()
    process("rebuild", folder, "tracking:retire")
    assert len(runs(old)) == 2
    tracker = tracker_of(folder)
    tracker.start(may_be_away=False)
    assert_each_point_once(tracker, folder)
    assert [run.info.run_id for run in runs(tracker, view=2)] == [old.run_id]


# A run whose process died.


def dead(folder, status="KILLED", reason="killed"):
    """As a reaper puts the run right: it keeps an MLflow run up to date and makes none."""
    tracker = Tracker(
        recipe_of(folder),
        run="a run",
        run_id="id-1",
        folder=folder / "a run",
        records=lambda: records_of(folder),
        tags={},
        create=False,
    )
    tracker.set_status(status, reason, T0)
    return tracker.flush()


def test_dead_run_is_put_right(folder):
    tracker = tracker_of(folder)
    tracker.start(may_be_away=False)
    commit(folder, 0, 1)
    late = state(folder)
    late["tags"]["fp8rl.late"] = "1"  # wanted, but its process died before it was pushed
    (folder / "a run" / "tracking" / "state.json").write_text(json.dumps(late))
    assert dead(folder)
    run = only_run(tracker)
    assert (run.info.status, run.info.end_time) == ("KILLED", T0)
    assert run.data.tags["fp8rl.reason"] == "killed"
    assert run.data.tags["fp8rl.arm"] == "demo"
    assert run.data.tags["fp8rl.late"] == "1"
    assert_each_point_once(tracker, folder)
    (folder / "a run" / "tracking" / "state.json").unlink()
    assert dead(folder, "FAILED", None)
    run = only_run(tracker)
    assert run.info.status == "FAILED"
    assert "fp8rl.reason" not in run.data.tags
    assert_each_point_once(tracker, folder)


def test_dead_run_is_never_made(folder):
    commit(folder, 0)
    assert dead(folder)
    assert runs(tracker_of(folder)) == []
    tracker_of(folder).start(may_be_away=False)
    assert only_run(tracker_of(folder)).info.status == "RUNNING"


# The server is away: SQLite.


def test_locked_database_is_away(folder, notes):
    tracker = tracker_of(folder)
    tracker.start(may_be_away=False)
    commit(folder, 0)
    with closing(sqlite3.connect(folder / "mlflow.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        for _ in range(2):
            begun = time.monotonic()
            assert not tracker.flush()
            assert time.monotonic() - begun < 4
        assert not dead(folder)
        begun = time.monotonic()
        tracker.put_text("note.txt", "x")
        assert time.monotonic() - begun < 0.5
        other.execute("ROLLBACK")
    assert "iterations 0 to 0" in tracker.pending()
    assert tracker.flush()
    assert tracker.flush()
    assert_each_point_once(tracker, folder)
    assert artifact(tracker, "note.txt") == "x"
    mine = [note for note in notes if "training goes on" in note]
    assert len(mine) == 2  # this tracker's and that of dead()
    assert "locked" in mine[0]
    assert len([note for note in notes if "is back and has" in note]) == 1


def test_database_that_is_gone_is_away(folder):
    tracker = tracker_of(folder)
    tracker.start(may_be_away=False)
    commit(folder, 0)
    (folder / "mlflow.db").rename(folder / "elsewhere.db")
    assert not tracker.flush()
    assert not (folder / "mlflow.db").exists()
    (folder / "elsewhere.db").rename(folder / "mlflow.db")
    assert tracker.flush()
    assert_each_point_once(tracker, folder)


def test_damaged_database_is_an_error(tmp_path):
    (tmp_path / "mlflow.db").write_bytes(b"not a database" * 100)
    with pytest.raises(TrackingError, match=r"mlflow\.db cannot be used"):
        tracker_of(tmp_path).start(may_be_away=True)


# The server is away: HTTP.


class Answers(BaseHTTPRequestHandler):
    """Answers /health well, and all else with the status that the address begins with; 209 is a 200
    whose end does not come."""

    def do_GET(self):
        code = 200 if self.path.endswith("/health") else int(self.path.split("/")[1])
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200 if code == 209 else code)
        self.send_header("Content-Length", "9" if code == 209 else "4")
        self.end_headers()
        self.wfile.write(b"nope")

    do_POST = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def answers():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("code", [209, 429, 500, 502, 503, 504, 521])
def test_answers_that_mean_away(tmp_path, answers, code):
    tracker = tracker_of(tmp_path, recipe_of(tmp_path, tracking=Tracking(uri=f"{answers}/{code}")))
    tracker.start(may_be_away=True)
    assert not tracker.flush()
    with pytest.raises(TrackingError, match="is away"):
        tracker.start(may_be_away=False)


@pytest.mark.parametrize("code", [200, 401, 403, 404])
def test_answers_that_mean_a_mistake(tmp_path, answers, code):
    from mlflow.exceptions import MlflowException

    tracker = tracker_of(tmp_path, recipe_of(tmp_path, tracking=Tracking(uri=f"{answers}/{code}")))
    with pytest.raises(MlflowException, match="nope"):
        tracker.start(may_be_away=True)


class MlflowServer:
    """`mlflow server` in a process group of its own."""

    def __init__(self, folder):
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.uri, self._process = folder, f"http://127.0.0.1:{self.port}", None

    def start(self):
        import requests

        if self._process is not None:
            return
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self.folder / 'mlflow.db'}"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        with (self.folder / "log").open("a") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.folder,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                requests.get(f"{self.uri}/health", timeout=1).raise_for_status()
                return
            except requests.RequestException:
                time.sleep(0.1)
        raise AssertionError((self.folder / "log").read_text())

    def signal(self, number):
        os.killpg(self._process.pid, number)

    def kill(self):
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory, database):
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(database, folder / "mlflow.db")
    server = MlflowServer(folder)
    yield server
    server.kill()


@pytest.fixture
def remote(tmp_path, server):
    """A recipe of a run that is tracked by the server, in an experiment of its own."""
    return recipe_of(tmp_path, tracking=Tracking(uri=server.uri, experiment=tmp_path.name))


def remote_run(tracker, recipe):
    client = client_of(tracker)
    experiment = client.get_experiment_by_name(recipe.tracking.experiment)
    (run,) = client.search_runs([experiment.experiment_id])
    return run


@pytest.fixture
def in_own_experiment(monkeypatch, remote):
    monkeypatch.setattr(sys.modules[__name__], "only_run", lambda tracker: remote_run(tracker, remote))


@pytest.mark.usefixtures("in_own_experiment")
def test_server_away_at_the_start_then_killed_in_the_middle(
    tmp_path, server, remote, notes, monkeypatch
):
    server.kill()
    tracker = tracker_of(tmp_path, remote)
    with pytest.raises(TrackingError, match=rf"{server.uri} is away.*Start that server.*tracking\.uri"):
        tracker.start(may_be_away=False)
    tracker.start(may_be_away=True)
    commit(tmp_path, 0)
    assert not tracker.flush()
    assert tracker.run_id is None
    for what in ("the MLflow run", "params", "recipe.yaml", "iterations 0 to 0", "RUNNING"):
        assert what in tracker.pending()
    server.start()
    assert tracker.flush()
    assert tracker.pending() == ""
    assert_each_point_once(tracker, tmp_path)
    tracker.put_table("precision.json", {"a": ["x"]})

    server.kill()
    begun = time.monotonic()
    for n in (1, 2, 3):
        commit(tmp_path, n)
        assert not tracker.flush()
    assert time.monotonic() - begun < 3
    tracker.put_json("summary.json", {"iterations": 3})
    tracker.set_status("FINISHED", ended_ms=T0)
    with monkeypatch.context() as patched:  # as if it went away between the try and the first call
        patched.setattr(Server, "_probe", lambda self: None)
        begun = time.monotonic()
        assert not tracker.flush()
        assert time.monotonic() - begun < 10
    server.start()
    assert tracker.flush()
    assert tracker.pending() == ""
    assert_each_point_once(tracker, tmp_path)
    run = only_run(tracker)
    assert (run.info.status, run.info.end_time) == ("FINISHED", T0)
    assert run.data.params == flatten(remote)
    assert json.loads(artifact(tracker, "summary.json")) == {"iterations": 3}
    assert "precision.json" in run.data.tags["mlflow.loggedArtifacts"]
    assert len([note for note in notes if "training goes on" in note]) == 2
    assert len([note for note in notes if "is back and has" in note]) == 2


@pytest.mark.usefixtures("in_own_experiment")
def test_server_that_hangs_is_away(tmp_path, server, remote):
    server.start()
    tracker = tracker_of(tmp_path, remote)
    tracker.start(may_be_away=False)
    commit(tmp_path, 0)
    server.signal(signal.SIGSTOP)
    try:
        begun = time.monotonic()
        assert not tracker.flush()
        assert time.monotonic() - begun < 6
    finally:
        server.signal(signal.SIGCONT)
    assert tracker.flush()
    assert_each_point_once(tracker, tmp_path)


@pytest.mark.usefixtures("in_own_experiment")
def test_resumed_and_rebuilt_over_http(tmp_path, server, remote):
    """As with SQLite, but a server answers otherwise in places: an end of 0, the limit on a call."""
    server.start()
    first = tracker_of(tmp_path, remote)
    commit(tmp_path, 0, 1, **{"mismatch/nan": math.nan})
    first.start(may_be_away=False)
    first.set_status("FAILED", "memory")
    first.flush()
    (tmp_path / "a run" / "tracking" / "state.json").unlink()
    resumed = tracker_of(tmp_path, remote)
    resumed.start(may_be_away=False)
    assert_each_point_once(resumed, tmp_path)
    run = only_run(resumed)
    assert (run.info.run_id, run.info.status, run.info.end_time) == (first.run_id, "RUNNING", None)
    assert "fp8rl.reason" not in run.data.tags
    take_back(tmp_path, to=0)
    assert resumed.rebuild()
    assert_each_point_once(resumed, tmp_path)
    assert client_of(resumed).get_run(first.run_id).info.lifecycle_stage == "deleted"
    commit(tmp_path, 1, **{f"m/{n}": 0.1 * n for n in range(1100)})
    assert resumed.flush()
    assert len(only_run(resumed).data.metrics) == len(records_of(tmp_path)[-1].metrics) + 1


def test_the_address_of_a_page_is_among_those_about_training_and_has_no_password():
    address = page("http://me:secret@mlflow:5000/", "experiments/1/runs/abc")
    assert address.endswith("@mlflow:5000/#/experiments/1/runs/abc?workflowType=machine_learning")
    assert "secret" not in address
    assert page("sqlite:///runs/mlflow.db", "experiments/1") is None
