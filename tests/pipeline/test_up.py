"""`fp8rl up` with the real servers: a run of a deployment from beginning to end, and nothing left."""

import subprocess
import sys

import httpx
import psutil
import pytest

from fp8rl.runs import Run
from fp8rl.services.ports import unused
from fp8rl.services.up import find_up
from tests.compare import point_faults
from tests.services import listening, services_of

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    with services_of(tmp_path_factory.mktemp("up")) as found:
        yield found


def test_all_are_healthy_and_a_second_up_starts_nothing(services):
    shown = services("status")
    assert shown.returncode == 0, shown.stdout
    assert shown.stdout.count("healthy") == 4
    before = {process.pid for process in find_up(services.runs).processes()}
    again = services("up", *services.settings)
    assert again.returncode == 0
    assert "it is up already" in again.stdout
    assert before <= {process.pid for process in find_up(services.runs).processes()}
    other = services("up", *services.settings[:2], f"ray_port={unused(1)[0]}")
    assert other.returncode == 2
    assert "`fp8rl down` first" in other.stderr


def test_only_this_machine_reaches_prefect_and_mlflow_and_ray_wants_its_token(services):
    for name in ("prefect_port", "mlflow_port"):
        assert listening(services.ports[name]) == {"127.0.0.1"}, name
    code = f"import ray; ray.init(address='127.0.0.1:{services.ports['ray_port']}')"
    without = {**services.environment, "RAY_AUTH_MODE": "disabled", "HOME": str(services.runs)}
    done = subprocess.run([sys.executable, "-c", code], env=without, capture_output=True, text=True)
    assert done.returncode != 0
    assert "auth" in (done.stdout + done.stderr).lower()
    up = find_up(services.runs)
    for path in (up.folder, up.folder / "ray_token"):
        assert path.stat().st_mode & 0o077 == 0, path
    # A page of somebody else's that a browser here shows may not speak to MLflow.
    search = f"{services.mlflow}/api/2.0/mlflow/experiments/search?max_results=1"
    assert httpx.get(search).status_code == 200
    assert httpx.get(search, headers={"Host": "evil.example"}).status_code == 403


def test_a_run_of_the_deployment_is_trained_and_tracked(services):
    flow_run = services.train("first")
    assert services.end_of(flow_run)["type"] == "COMPLETED"
    assert Run(services.runs / "first").state().state == "finished"
    from mlflow import MlflowClient

    client = MlflowClient(services.mlflow)
    experiment = client.get_experiment_by_name("fp8rl")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.tags["prefect.flow_run_id"] == flow_run


def test_runs_wait_for_each_other_and_down_asks_first(services):
    running = services.train("second", "iterations=200")
    waiting = services.train("third")
    services.until(
        "its first rollout", lambda: Run(services.runs / "second").journal.is_committed(1, "rollout")
    )
    assert services.state(running) == "RUNNING"
    assert services.state(waiting) == "SCHEDULED"
    refused = services("down")
    assert refused.returncode == 2
    assert "training runs are at work: second" in refused.stderr
    assert services.state(running) == "RUNNING"

    processes = find_up(services.runs).processes()
    done = services("down", "--force")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "to carry on: fp8rl resume second" in done.stdout
    # Who started this test may not have taken notice of all ends yet.
    assert [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    # It was told to end, and did so in good order.
    assert Run(services.runs / "second").state().state == "cancelled"
    assert Run(services.runs / "second").journal.is_committed(1, "rollout")
    assert find_up(services.runs) is None
    for port in services.ports.values():
        assert listening(port) == set()

    # As it said, and without the services: in the same place of the same experiment.
    run = Run(services.runs / "second")
    last = run.journal.iterations()[-1].iteration + 1
    resumed = services("resume", "second", f"iterations={last}")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert run.state().state == "finished"
    assert point_faults(run) == ([], [])
