"""A Prefect server of its own with a work pool, the deployment of infra/prefect.yaml and a worker."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from fp8rl.recipe.load import load_recipe
from fp8rl.runs import Run, State
from fp8rl.tracking import RUN_ID_TAG, tracking_uri
from tests.arms import SHORT
from tests.ui.browser import page, pictures  # noqa: F401  fixtures

ROOT = Path(__file__).parents[2]
# The recipe of the pipeline tests, whose run is the reference; these keys change no number.
OVERRIDES = [*SHORT, "checkpoint.every=2", "retry.delay_s=0.1"]
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
# Long, since other things may run on the machine: they say that something hangs, not that it is slow.
START_S, END_S = 300.0, 600.0


def until(what: str, seconds: float, look: Callable[[], Any]) -> Any:
    """What `look` returns once that is true; fails after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(0.5)
    pytest.fail(f"waited {seconds:.0f} s for {what}")


class Prefect:
    """The server and the worker as processes, and the server's API as the UI calls it."""

    def __init__(self, home: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.home, self.port, self.ui = home, port, f"http://127.0.0.1:{port}"
        self.api = f"{self.ui}/api"
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "FP8RL_"))}
        self._env = keep | {
            "HOME": str(home),
            "PREFECT_HOME": str(home / "prefect"),
            "PREFECT_API_URL": self.api,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
        }
        self._http = httpx.Client(base_url=self.api, timeout=60.0)

    # Processes.

    def start(self) -> None:
        """Starts the server, deploys as infra/prefect.yaml says, and starts the worker."""
        self._spawn("server", "server", "start", "--host", "127.0.0.1", "--port", str(self.port))
        until("the Prefect server", START_S, self._answers)
        self.command("prefect", "work-pool", "create", "fp8rl", "--type", "process")
        self.command(
            "prefect", "--no-prompt", "deploy", "--prefect-file", "infra/prefect.yaml", "--all"
        )
        # The worker from another folder: the deployment knows its own.
        self._spawn("worker", "worker", "start", "--pool", "fp8rl", cwd=self.home)

    def _spawn(self, name: str, *words: str, cwd: Path = ROOT) -> None:
        with (self.home / f"{name}.log").open("w") as log:
            subprocess.Popen(
                [sys.executable, "-m", "prefect", *words],
                cwd=cwd,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def command(self, program: str, *words: str) -> str:
        """Runs a program of the environment from the repository's root; what it printed."""
        done = subprocess.run(
            [Path(sys.executable).parent / program, *words],
            cwd=ROOT,
            env=self._env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def processes(self, **environment: str) -> list[psutil.Process]:
        """Those of the server, the worker and their flow runs: nobody else has this home."""
        wanted = {"HOME": str(self.home), **environment}
        return [p for p in psutil.process_iter() if wanted.items() <= _environment_of(p).items()]

    def flow_process(self, run_id: str) -> psutil.Process:
        """The process of the flow run; what it started came later."""
        found = self.processes(PREFECT__FLOW_RUN_ID=run_id)
        return min(found, key=lambda process: process.create_time())

    def actors(self, run_id: str) -> set[str]:
        """Which of the flow run's engine and learner processes are there."""
        found = self.processes(PREFECT__FLOW_RUN_ID=run_id)
        # Ray's title of an idle one is "ray::EngineActor", of a busy one it has its name and method.
        titles = [(_cmdline_of(process) or [""])[0] for process in found]
        kinds = ("EngineActor", "LearnerActor")
        return {kind for kind in kinds for t in titles if t.startswith("ray::") and kind in t}

    def stop(self) -> None:
        """Ends all that was started here, flow runs too."""
        self._http.close()

        def ended() -> bool:
            left = self.processes()
            for process in left:
                process.kill()
            return not left

        until("the end of the server and its worker", 60, ended)

    # The API.

    def _answers(self) -> bool:
        try:
            return self._http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def _call(self, method: str, path: str, **body: Any) -> Any:
        """An API call's answer, asked again where the database of a busy machine was locked."""

        def answered() -> httpx.Response | None:
            try:
                answer = self._http.request(method, path, json=body or None)
            except httpx.ReadTimeout:
                if method == "GET" or path.endswith("/filter"):
                    return None
                raise  # it may have been done
            return None if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE else answer

        answer = until(f"{method} {path}", START_S, answered)
        answer.raise_for_status()
        return answer.json()

    def get(self, path: str) -> Any:
        return self._call("GET", path)

    def post(self, path: str, **body: Any) -> Any:
        return self._call("POST", path, **body)

    def run(
        self, faults: list[dict[str, str]], deployment: str = "train/train", **parameters: Any
    ) -> str:
        """Has the deployment run, with planted faults; the flow run's id."""
        deployment = self.get(f"/deployments/name/{deployment}")["id"]
        made = self.post(
            f"/deployments/{deployment}/create_flow_run",
            state={"type": "SCHEDULED", "message": "Run from the UI"},
            parameters=parameters,
            job_variables={"env": {"FP8RL_FAULTS": json.dumps(faults)}} if faults else {},
        )
        return str(made["id"])

    def state(self, run_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/flow_runs/{run_id}")["state"]
        return found

    def end_of(self, run_id: str) -> dict[str, Any]:
        """The flow run's final state, once it has one."""

        def ended() -> Any:
            state = self.state(run_id)
            return state["type"] in FINAL and state

        found: dict[str, Any] = until(f"the end of flow run {run_id}", END_S, ended)
        return found

    def retry(self, run_id: str) -> None:
        """Retry, as the UI's button posts it."""
        state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
        self._set_state(run_id, state)

    def cancel(self, run_id: str) -> None:
        """Cancel, as the UI's button posts it."""
        self._set_state(run_id, {"type": "CANCELLING", "name": "Cancelling"})

    def _set_state(self, run_id: str, state: dict[str, str]) -> None:
        answer = self.post(f"/flow_runs/{run_id}/set_state", state=state, force=False)
        assert answer["status"] == "ACCEPT", answer

    def resume(self, run_id: str) -> None:
        """Resume of a paused flow run, as the UI's button posts it."""
        answer = self.post(f"/flow_runs/{run_id}/resume")
        assert answer["status"] == "ACCEPT", answer

    def events(self, name: str, count: int) -> list[dict[str, Any]]:
        """The events of that name, the earliest first, once there are `count`; else it fails."""

        def written() -> Any:  # the server writes events down in batches, 5 s apart
            found = self.post("/events/filter", filter={"event": {"name": [name]}})["events"]
            return len(found) >= count and found

        found: list[dict[str, Any]] = until(f"{count} events {name}", 60, written)
        return sorted(found, key=lambda event: event["occurred"])

    def runs_called(self, name: str) -> list[dict[str, Any]]:
        """The flow runs of that name."""
        return list(self.post("/flow_runs/filter", flow_runs={"name": {"any_": [name]}}))

    def iterations(self, run_id: str) -> list[dict[str, Any]]:
        """The flow run's subflow runs, in order of their start. A retry has those that did not complete
        run anew, and shows both.
        """
        found = self.post("/flow_runs/filter", flow_runs={"parent_flow_run_id": {"any_": [run_id]}})
        return sorted(found, key=_start)

    def parts(self, run_id: str) -> dict[str, str]:
        """{name: state's name} of the flow run's iterations and of the steps in them, each as it came
        out the last time.
        """
        flows = self.iterations(run_id)
        within = {"id": {"any_": [flow["id"] for flow in flows]}}
        steps = sorted(self.post("/task_runs/filter", flow_runs=within), key=_start)
        return {run["name"].rpartition("/")[2]: run["state_name"] for run in [*flows, *steps]}

    def wait_for_log(self, run_id: str, words: str) -> None:
        """Waits for `words` in the flow run's log, as its page shows it; fails where none come."""
        logs = {"flow_run_id": {"any_": [run_id]}}

        def said() -> bool:  # lines are sent in batches, some seconds apart
            found = self.post("/logs/filter", logs=logs, sort="TIMESTAMP_DESC")
            return any(words in line["message"] for line in found)

        until(f"{words!r} in the log", 60, said)


def _start(run: dict[str, Any]) -> str:
    return str(run["start_time"] or run["created"])


def _environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _cmdline_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@dataclass(frozen=True)
class Seen:
    """What is to be seen of a run at one time: in the Prefect UI (state, parts), in its folder (run,
    files: when each step's file was written), in MLflow.
    """

    state: dict[str, Any]
    parts: dict[str, str]
    run: State
    attempts: list[str]
    files: dict[str, int]
    mlflow: str


class Trained:
    """A training run of the deployment, and the ways to break it. more: further recipe overrides."""

    def __init__(self, prefect: Prefect, runs: Path, name: str, *more: str) -> None:
        self.prefect = prefect
        self.run = Run(runs / name)
        self._marks = runs / f".{name}-faults"
        # As a user writes it: from the repository's root, which is not the worker's own folder.
        overrides = [*OVERRIDES, *more, f"name={name}", f"runs_dir={os.path.relpath(runs, ROOT)}"]
        recipe = load_recipe(ROOT / "configs" / "tiny" / "fp8-e2e-kv.yaml", overrides).recipe
        self.recipe = recipe.model_dump(mode="json")
        self.id = ""

    def start(self, faults: dict[str, tuple[str, str]]) -> None:
        """Runs the deployment. faults: {name: (what happens, at which point)}, each once."""
        self.id = self.prefect.run(self._planted(faults), recipe=self.recipe)

    def resume(self, faults: dict[str, tuple[str, str]]) -> None:
        """Carries the run on with a new flow run, by its name alone; from here on that one counts."""
        recipe = {"runs_dir": self.recipe["runs_dir"]}
        self.id = self.prefect.run(self._planted(faults), resume=self.run.name, recipe=recipe)

    def _planted(self, faults: dict[str, tuple[str, str]]) -> list[dict[str, str]]:
        self._marks.mkdir(parents=True, exist_ok=True)
        return [
            {"do": what, "at": at, "once": str(self._marks / name)}
            for name, (what, at) in faults.items()
        ]

    def reached(self, fault: str) -> None:
        """Waits until the fault has happened."""
        until(f"the fault {fault}", END_S, (self._marks / fault).exists)

    def ended(self) -> Seen:
        """What is to be seen at the end that comes next; fails where a process of the flow run, an
        actor too, outlives it.
        """
        self.prefect.end_of(self.id)
        # A worker notices the end of a process some seconds after the state. Retry in between would
        # have it take the new process for dead.
        until(
            "the end of the flow run's processes",
            120,
            lambda: not self.prefect.processes(PREFECT__FLOW_RUN_ID=self.id),
        )
        until("the records of the end", 120, self._is_put_right)
        state, parts = self.prefect.end_of(self.id), self._parts()
        files, mlflow = self._files(), self._mlflow()
        return Seen(state, parts, self.run.state(), self._attempts(), files, mlflow)

    def _parts(self) -> dict[str, str]:
        """The steps' states, as they are once the server has written all of them down."""
        end = time.monotonic() + 30
        while {"Running", "Pending"} & set((parts := self.prefect.parts(self.id)).values()):
            if time.monotonic() > end:
                break
            time.sleep(0.2)
        return parts

    def _is_put_right(self) -> bool:
        return self.run.state().is_over and self._attempts()[-1] != "running"

    def _attempts(self) -> list[str]:
        return [attempt["state"] for attempt in self.run.attempts()]

    def _files(self) -> dict[str, int]:
        folder = self.run.folder / "iterations"
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in files}

    def _mlflow(self) -> str:
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri(self.run.recipe))
        experiment = client.get_experiment_by_name(self.run.recipe.tracking.experiment).experiment_id
        (found,) = client.search_runs([experiment], f"tags.`{RUN_ID_TAG}` = '{self.run.id}'")
        return str(found.info.status)


@pytest.fixture(scope="session")
def prefect(tmp_path_factory):
    """A standing server with a worker, for the whole session."""
    services = Prefect(tmp_path_factory.mktemp("prefect"))
    try:
        services.start()
        yield services
    finally:
        services.stop()
