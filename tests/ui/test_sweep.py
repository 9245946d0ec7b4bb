"""A sweep that a worker runs: its children are runs of the deployment `train`, and outlive it."""

import os
import signal

import pytest
import yaml

from fp8rl.runs import Run
from tests.arms import TINY
from tests.compare import point_faults
from tests.ui.conftest import END_S, OVERRIDES, ROOT, until

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]


def test_sweep_that_is_killed_and_retried_begins_no_child_twice(prefect, runs_dir, tmp_path):
    overrides = dict(text.split("=") for text in [*OVERRIDES, "iterations=2"])
    values = {
        "name": "served",
        "arms": [str(TINY / "bf16.yaml")],
        "seeds": [0, 1],
        "overrides": {key: yaml.safe_load(value) for key, value in overrides.items()},
        "runs_dir": os.path.relpath(runs_dir, ROOT),
    }
    file = tmp_path / "served.yaml"
    file.write_text(yaml.safe_dump(values))
    children = [Run(runs_dir / f"served-bf16-s{seed}") for seed in (0, 1)]

    sweep = prefect.run([], "sweep/sweep", file=str(file))
    until("the first child", END_S, lambda: children[0].journal.is_committed(1, "rollout"))
    os.kill(prefect.flow_process(sweep).pid, signal.SIGKILL)
    assert prefect.end_of(sweep)["type"] == "CRASHED"
    until(
        "the end of the sweep's process", 120, lambda: not prefect.processes(PREFECT__FLOW_RUN_ID=sweep)
    )
    assert not children[0].state().is_over  # it goes on without the sweep

    prefect.retry(sweep)
    ended = until(
        "the sweep's end",
        END_S,
        lambda: (s := prefect.state(sweep))["type"] in ("COMPLETED", "FAILED") and s,
    )
    assert ended["type"] == "COMPLETED", ended
    train = prefect.get("/deployments/name/train/train")["id"]
    for child in children:
        assert child.state().state == "finished"
        assert len(child.attempts()) == 1
        assert point_faults(child) == ([], [])
        (run,) = prefect.runs_called(child.name)
        assert (run["state_type"], run["deployment_id"]) == ("COMPLETED", train)
        assert run["id"] == child.attempts()[0]["prefect_flow_run"]
