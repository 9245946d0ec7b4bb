"""A sweep that its deployment's schedule starts: a child is killed in the middle and retried, the rest
goes on, and the comparison of its arms is held against the raw runs."""

import re
import signal
from datetime import UTC, datetime, timedelta

import pytest

from fp8rl.comparison.publish import default_folder
from fp8rl.runs import Run
from fp8rl.sweep.plan import name_of_flow
from tests.arms import SHORT
from tests.compare import point_faults
from tests.comparison_oracle import PageReader, RawRun
from tests.comparison_page import require_right
from tests.services import services_of
from tests.serving import mlflow_sweep, overlaps, write_sweep

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

ARMS = ("bf16", "fp8-rollout", "fp8-e2e", "fp8-e2e-kv")
SEEDS = (0, 1)


def test_scheduled_sweep_survives_the_death_of_a_child_and_its_comparison_is_right(tmp_path):
    with services_of(tmp_path / "runs") as services:
        file = write_sweep(
            tmp_path / "nightly.yaml", "nightly-{date}", ARMS, SEEDS, SHORT, experiment="nightly"
        )
        sweep = begin_by_schedule(services, str(file))
        name = services.until("its plan", lambda: name_of_flow(services.runs, sweep))
        assert re.fullmatch(r"nightly-\d{8}", name)
        runs = {(a, s): Run(services.runs / f"{name}-{a}-s{s}") for a in ARMS for s in SEEDS}
        children = list(runs.values())
        killed, after = children[2:4]

        services.until("the middle of a child", lambda: killed.journal.is_committed(1, "train"))
        (attempt,) = killed.attempts()
        services.flow_process(attempt["prefect_flow_run"]).send_signal(signal.SIGKILL)
        assert services.end_of(attempt["prefect_flow_run"])["type"] == "CRASHED"
        services.until("the next child", after.attempts)
        assert services.state(sweep) == "RUNNING"
        shown = {row["child"]: row for row in services.table(f"sweep-{name}-children")}
        assert shown[killed.name]["state"] == "killed"
        assert "gone without a word" in shown[killed.name]["reason"]

        # Its own Retry, while the others go on.
        services.retry(attempt["prefect_flow_run"])
        for run in children:
            services.until(f"the end of {run.name}", lambda run=run: run.state().state == "finished")
        assert services.end_of(sweep)["type"] == "COMPLETED"

        for run in children:
            assert run.state().state == "finished"
            ends = ["killed", "finished"] if run is killed else ["finished"]
            assert [one["state"] for one in run.attempts()] == ends
            assert {one["prefect_flow_run"] for one in run.attempts()} == {
                found["id"] for found in services.runs_called(run.name)
            }
            assert point_faults(run) == ([], [])
        assert overlaps(children) == []
        parent, rows = mlflow_sweep(services, name)
        assert parent.info.status == "FINISHED"
        assert parent.data.metrics["sweep/finished"] == len(children)
        assert [(row["child"], row["state"]) for row in rows] == [
            (r.name, "finished") for r in children
        ]

        made = services.run("compare/compare", experiment="nightly")
        assert services.end_of(made)["type"] == "COMPLETED"
        page = PageReader((default_folder(services.runs, "nightly") / "comparison.html").read_text())
        require_right(page, {a: [RawRun(runs[a, s].folder) for s in SEEDS] for a in sorted(ARMS)})


def begin_by_schedule(services, file):
    """Switches the nightly schedule on, for a moment that is near, and off once it has made a run that
    works; its id."""
    deployment = services.deployment("sweep/sweep")
    (schedule,) = deployment["schedules"]
    assert (schedule["slug"], schedule["active"]) == ("nightly", False)
    path = f"/deployments/{deployment['id']}/schedules/{schedule['id']}"
    of_it = {"deployments": {"id": {"any_": [deployment["id"]]}}}

    def made():
        found = services.call("POST", "/flow_runs/filter", of_it)
        return {run["id"]: datetime.fromisoformat(run["expected_start_time"]) for run in found}

    # The scheduler makes runs some time ahead. On a busy machine it comes too late for a moment that is
    # too near: then a later one.
    ahead = timedelta(seconds=30)
    while True:
        ahead *= 2
        soon = datetime.now(UTC) + ahead
        when = {"interval": 3600, "anchor_date": soon.isoformat(), "timezone": "UTC"}
        services.call("PATCH", path, {"active": True, "schedule": when, "parameters": {"file": file}})
        planned = services.until("the runs that the schedule makes", made)
        (first, begins) = min(planned.items(), key=lambda one: one[1])
        if begins - soon < timedelta(minutes=1):
            break
        services.call("PATCH", path, {"active": False})
    services.until("the sweep at work", lambda: services.state(first) == "RUNNING")
    services.call("PATCH", path, {"active": False})
    assert list(made()) == [first]
    run = services.flow_run(first)
    assert run["auto_scheduled"]
    assert run["created_by"]["type"] == "SCHEDULE"
    return first
