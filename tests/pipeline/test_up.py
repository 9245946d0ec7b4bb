"""`fp8rl up` with the real servers: a run of a deployment from beginning to end, and nothing left."""

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from fp8rl.runs import Run
from fp8rl.services.ports import unused
from fp8rl.services.up import find_up

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SMALL = [
    *("iterations=1", "warm_start.steps=20", "rollout.prompts=4", "rollout.samples=4"),
    *("task.val_prompts=8", "evaluate.samples=1"),
]
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
# Long, since other things may run on the machine: it says that something hangs, not that it is slow.
END_S = 600.0


class Services:
    """The `fp8rl` command for one runs folder, and the API of its Prefect server."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        ports = unused(3)
        keys = ("prefect_port", "mlflow_port", "ray_port")
        self.settings = [f"{key}={port}" for key, port in zip(keys, ports, strict=True)]
        self.ports = dict(zip(keys, ports, strict=True))
        self.api = httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}/api", timeout=60.0)
        own = ("PREFECT_", "MLFLOW_TRACKING_URI", "RAY_ADDRESS", "FP8RL_")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(own)}

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "flows.cli", *words, "--runs-dir", str(self.runs)],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=END_S,
        )

    def train(self, name: str, *more: str) -> str:
        """Has the deployment run, as its form does; the flow run's id."""
        deployment = self.api.get("/deployments/name/train/train").raise_for_status().json()
        parameters = {
            "recipe_file": "configs/tiny/bf16.yaml",
            "overrides": [*SMALL, f"name={name}", *more],
            "runs_dir": deployment["parameters"]["runs_dir"],
            "resume": None,
        }
        made = self.api.post(
            f"/deployments/{deployment['id']}/create_flow_run",
            json={"state": {"type": "SCHEDULED"}, "parameters": parameters},
        )
        return str(made.raise_for_status().json()["id"])

    def state(self, run: str) -> str:
        return str(self.api.get(f"/flow_runs/{run}").raise_for_status().json()["state"]["type"])

    def until(self, what: str, look) -> None:
        end = time.monotonic() + END_S
        while not look():
            assert time.monotonic() < end, f"waited {END_S:.0f} s for {what}"
            time.sleep(0.5)


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    found = Services(tmp_path_factory.mktemp("up"))
    done = found("up", *found.settings)
    assert done.returncode == 0, done.stdout + done.stderr
    yield found
    found.api.close()
    up = find_up(found.runs)
    if up is not None:
        for process in up.processes():
            process.kill()


def listening(port):
    """The addresses at which somebody listens on `port`."""
    connections = psutil.net_connections(kind="tcp")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port}


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
    url = f"http://127.0.0.1:{services.ports['mlflow_port']}"
    search = f"{url}/api/2.0/mlflow/experiments/search?max_results=1"
    assert httpx.get(search).status_code == 200
    assert httpx.get(search, headers={"Host": "evil.example"}).status_code == 403


def test_a_run_of_the_deployment_is_trained_and_tracked(services):
    flow_run = services.train("first")
    services.until("the end of the run", lambda: services.state(flow_run) in FINAL)
    assert services.state(flow_run) == "COMPLETED"
    assert Run(services.runs / "first").state().state == "finished"
    from mlflow import MlflowClient

    client = MlflowClient(f"http://127.0.0.1:{services.ports['mlflow_port']}")
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
    assert [process for process in processes if process.is_running()] == []
    assert find_up(services.runs) is None
    for port in services.ports.values():
        assert listening(port) == set()
