"""A sweep by the real stack: a child is killed, then the sweep itself, and it is started again."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml

from fp8rl.runs import Run
from fp8rl.sweep.plan import PARENT_TAG, SWEEP_TAG, read_plan, sweep_folder
from fp8rl.tracking import RUN_ID_TAG, tracking_uri
from tests.arms import SHORT, TINY
from tests.compare import run_differences
from tests.kill.harness import KILLED, PATIENCE_S, Commands, faults_of

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

ARMS = ("bf16", "fp8-e2e-kv")
MIDDLE = "commit:rollout.0001:2:before-record"


def write_sweep(folder, runs, **more):
    values = {
        "name": "both",
        "arms": [str(TINY / f"{arm}.yaml") for arm in ARMS],
        "overrides": dict(text.split("=") for text in SHORT),
        "runs_dir": str(runs),
        **more,
    }
    values["overrides"] = {k: int(v) for k, v in values["overrides"].items()}
    path = folder / "both.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def until(what, look):
    end = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.2)


def mlflow_runs(run: Run):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri(run.recipe))
    experiment = client.get_experiment_by_name(run.recipe.tracking.experiment).experiment_id
    found = client.search_runs([experiment], f"tags.`{SWEEP_TAG}` = 'both'")
    return client, {one.data.tags[RUN_ID_TAG]: one for one in found}


def test_sweep_whose_child_is_killed_and_that_is_killed_itself_ends_whole(runs_dir, run_arm, tmp_path):
    references = [Run(run_arm(arm).journal.folder) for arm in ARMS]
    file = write_sweep(tmp_path, runs_dir)
    folder = sweep_folder(runs_dir, "both")
    commands = Commands(runs_dir, tmp_path / "logs")
    first, second = (commands.run_of(f"both-{arm}-s0") for arm in ARMS)

    # The first child is killed in the middle; the sweep goes on with the second, and is killed in it.
    with commands.started("sweep", str(file), kill=(MIDDLE,)) as (process, end):
        until("the second child", lambda: second.journal.is_committed(1, "train"))
        os.kill(process.pid, signal.SIGKILL)
        ended = end()
    assert (ended.code, ended.reached) == (KILLED, (MIDDLE,)), ended.text[-3000:]
    assert "both-bf16-s0 killed" in ended.text
    assert run_differences(references[0], first, whole=False) == []
    until("the second child's end", lambda: second.state().is_over)
    assert second.state().state == "cancelled"  # the kernel told it to end, and it did in good order
    plan = read_plan(folder)

    # Another plan under the same name is refused, and nothing is touched.
    refused = commands.call("sweep", str(file), "seeds=[0,1]")
    assert refused.code == 2
    assert "seeds: [0] -> [0, 1]" in refused.text
    assert "child both-bf16-s1: it would be new" in refused.text
    assert len(first.attempts()) == 1

    # Started again, it carries both on.
    ended = commands.call("sweep", str(file))
    assert ended.code == 0, ended.text[-3000:]
    for reference, run in zip(references, (first, second), strict=True):
        assert run.state().state == "finished"
        assert len(run.attempts()) == 2
        assert faults_of(reference, run, whole=True) == ([], 0, 0)
    assert read_plan(folder) == plan

    # A third time there is nothing to do.
    before = {path: path.stat().st_mtime_ns for run in (first, second) for path in files_of(run)}
    ended = commands.call("sweep", str(file))
    assert ended.code == 0, ended.text[-3000:]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert [len(run.attempts()) for run in (first, second)] == [2, 2]

    # MLflow has the sweep, with both children under it.
    client, found = mlflow_runs(first)
    assert set(found) == {plan["id"], first.id, second.id}
    parent = found[plan["id"]]
    assert parent.info.status == "FINISHED"
    assert parent.data.params["seeds"] == "[0]"
    assert parent.data.metrics["sweep/finished"] == 2
    for run, arm in ((first, "bf16"), (second, "fp8-e2e-kv")):
        child = found[run.id]
        assert child.info.status == "FINISHED"
        assert child.data.tags[PARENT_TAG] == parent.info.run_id
        assert (child.data.tags["fp8rl.arm"], child.data.tags["fp8rl.seed"]) == (arm, "0")
    path = client.download_artifacts(parent.info.run_id, "children.json", str(tmp_path))
    table = json.loads(Path(path).read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["child"] for row in rows] == [first.name, second.name]
    for row, run in zip(rows, (first, second), strict=True):
        assert row["state"] == "finished"
        assert row["iteration"] == 3
        assert row["mlflow_run"] == found[run.id].info.run_id
        assert row["accuracy"] == found[run.id].data.metrics["val/accuracy"]


def files_of(run: Run):
    return [path for path in run.folder.rglob("*") if path.is_file()]
