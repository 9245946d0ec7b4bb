"""`fp8rl up` on ports and a runs folder of its own, and its Prefect server's API as the UI calls it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from fp8rl.services.ports import unused
from fp8rl.services.up import find_up

ROOT = Path(__file__).parents[1]
# A tiny run of some seconds, for what does not look at numbers.
SMALL = [
    *("iterations=1", "warm_start.steps=20", "rollout.prompts=4", "rollout.samples=4"),
    *("task.val_prompts=8", "evaluate.samples=1"),
]
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
# Long, since other things may run on the machine: it says that something hangs, not that it is slow.
END_S = 600.0
# Of the user's own services: these tests use none of them.
_OWN = ("PREFECT_", "MLFLOW_TRACKING_URI", "RAY_ADDRESS", "FP8RL_")


class Services:
    """The `fp8rl` command for one runs folder, and the API of its Prefect server.

    environment: more of it for the commands, and so for what they start. auth: (user, password) that
    the API asks for.
    """

    def __init__(
        self,
        runs: Path,
        environment: dict[str, str] | None = None,
        auth: tuple[str, str] | None = None,
    ) -> None:
        self.runs = runs
        ports = unused(3)
        keys = ("prefect_port", "mlflow_port", "ray_port")
        self.settings = [f"{key}={port}" for key, port in zip(keys, ports, strict=True)]
        self.settings.append(f"start_timeout_s={END_S}")
        self.ports = dict(zip(keys, ports, strict=True))
        self.api = httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}/api", timeout=60.0, auth=auth)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_OWN)}
        self.environment = kept | (environment or {})

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "flows.cli", *words, "--runs-dir", str(self.runs)],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * END_S,
        )

    @property
    def mlflow(self) -> str:
        """The address of its MLflow server."""
        return f"http://127.0.0.1:{self.ports['mlflow_port']}"

    def up(self, *words: str) -> None:
        done = self("up", *self.settings, *words)
        assert done.returncode == 0, done.stdout + done.stderr

    def close(self) -> None:
        """Kills whatever of it is left."""
        self.api.close()
        if (up := find_up(self.runs)) is not None:
            for process in up.processes():
                process.kill()

    def until(self, what: str, look: Callable[[], Any]) -> Any:
        """What `look` returns once that is true."""
        end = time.monotonic() + END_S
        while not (found := look()):
            assert time.monotonic() < end, f"waited {END_S:.0f} s for {what}"
            time.sleep(0.5)
        return found

    # The API.

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """An API call's answer; asked again where the server restarts or its database was locked."""

        def answered() -> httpx.Response | None:
            try:
                answer = self.api.request(method, path, json=body)
            except httpx.ConnectError:  # nothing was done
                return None
            except httpx.TransportError:
                if method == "GET" or path.endswith("/filter"):
                    return None
                raise
            return None if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE else answer

        answer = self.until(f"{method} {path}", answered).raise_for_status()
        return answer.json() if answer.content else None

    def deployment(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call("GET", f"/deployments/name/{name}")
        return found

    def run(self, deployment: str, **parameters: Any) -> str:
        """Has the deployment run; the flow run's id."""
        found = self.deployment(deployment)
        body = {"state": {"type": "SCHEDULED"}, "parameters": found["parameters"] | parameters}
        return str(self.call("POST", f"/deployments/{found['id']}/create_flow_run", body)["id"])

    def train(self, name: str, *more: str) -> str:
        """Has the deployment `train` run, as its form does; the flow run's id."""
        overrides = [*SMALL, f"name={name}", *more]
        return self.run("train/train", recipe_file="configs/tiny/bf16.yaml", overrides=overrides)

    def flow_run(self, run: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call("GET", f"/flow_runs/{run}")
        return found

    def state(self, run: str) -> str:
        return str(self.flow_run(run)["state_type"])

    def end_of(self, run: str) -> dict[str, Any]:
        """The flow run's final state, once it has one."""

        def ended() -> dict[str, Any] | None:
            state = self.flow_run(run)["state"]
            return state if state["type"] in FINAL else None

        found: dict[str, Any] = self.until(f"the end of flow run {run}", ended)
        return found

    def completes(self, run: str) -> None:
        """Waits for the flow run's end; fails where that is another than Completed."""
        assert self.end_of(run)["type"] == "COMPLETED"

    def retry(self, run: str) -> None:
        """Retry, as the UI's button posts it."""
        state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
        answer = self.call("POST", f"/flow_runs/{run}/set_state", {"state": state, "force": False})
        assert answer["status"] == "ACCEPT", answer

    def runs_called(self, name: str) -> list[dict[str, Any]]:
        """The flow runs of that name."""
        body = {"flow_runs": {"name": {"any_": [name]}}}
        return list(self.call("POST", "/flow_runs/filter", body))

    def table(self, key: str) -> list[dict[str, str]]:
        """The rows of the newest table artifact `key`; empty where there is none yet."""
        body = {"artifacts": {"key": {"any_": [key]}}, "sort": "CREATED_DESC", "limit": 1}
        found = self.call("POST", "/artifacts/filter", body)
        return json.loads(found[0]["data"]) if found else []

    # Processes.

    def flow_process(self, run: str) -> psutil.Process:
        """The process of the flow run; what it started came later."""
        up = find_up(self.runs)
        assert up is not None
        found = [p for p in up.processes() if _environment_of(p).get("PREFECT__FLOW_RUN_ID") == run]
        return min(found, key=lambda process: process.create_time())

    def at_work(self, run: str) -> set[str]:
        """Which processes of the flow run there are: its own, and its actors on the standing Ray, where
        no other run is at work.
        """
        up = find_up(self.runs)
        assert up is not None
        found = set()
        for process in up.processes():
            with suppress(psutil.NoSuchProcess):
                title = (process.cmdline() or [""])[0]
                found |= {kind for kind in ("EngineActor", "LearnerActor") if kind in title}
            if _environment_of(process).get("PREFECT__FLOW_RUN_ID") == run:
                found.add("flow run")
        return found

    def service_process(self, name: str) -> psutil.Process:
        """What supervisord started for the service `name`."""
        up = find_up(self.runs)
        assert up is not None
        ours = psutil.Process(up.supervisor_pid).children()
        (found,) = [p for p in ours if name in p.cmdline() and "worker" not in p.cmdline()]
        return found


@contextmanager
def services_of(runs: Path, *words: str, **more: Any) -> Iterator[Services]:
    """`fp8rl up` for `runs`, with `words`; ended at the end, whatever happened. more: of `Services`."""
    found = Services(runs, **more)
    try:
        found.up(*words)
        yield found
    finally:
        found.close()


def _environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def listening(port: int) -> set[str]:
    """The addresses at which somebody listens on `port`."""
    connections = psutil.net_connections(kind="tcp")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port}
