"""The services of one runs folder: starting them, finding them again, stopping them.

runs/.up/up.json            what is up, and the environment that runs are given; no secrets
runs/.up/supervisord.conf   what supervisord starts
runs/.up/logs/              a log of each service
runs/.up/prefect/           Prefect's home: its database with SQLite, results
runs/.up/ray_token          the secret that Ray asks for
runs/mlflow.db, mlartifacts MLflow's, the same with and without an `up`
"""

import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8rl.files import write_atomic
from fp8rl.lock import is_alive, process_start
from fp8rl.services import databases, health
from fp8rl.services.config import UpConfig, UpError
from fp8rl.services.plan import Service, make_plan, public, write_token
from fp8rl.services.ports import require_free
from fp8rl.services.program import MARKER
from fp8rl.services.supervisor import Supervisor, log_of, start, write_config

Say = Callable[[str], None]


@dataclass(frozen=True)
class Health:
    """How one service is. state: healthy, starting, not healthy, failed or stopped."""

    service: Service
    state: str
    detail: str
    log: Path | None

    @property
    def is_well(self) -> bool:
        return self.state == "healthy"


class Up:
    """Services that an `up` has started, alive or not."""

    def __init__(self, folder: Path, record: dict[str, Any]) -> None:
        self.folder, self._record = folder, record
        self.services = [Service(**one) for one in record["services"]]
        self.environment: dict[str, str] = record["environment"]
        self.supervisor = Supervisor(Path(record["runtime"]))

    @property
    def runs(self) -> Path:
        return self.folder.parent

    @property
    def config(self) -> dict[str, Any]:
        """Its settings, without the database's URL, which holds a password."""
        found: dict[str, Any] = self._record["config"]
        return found

    @property
    def supervisor_pid(self) -> int:
        return int(self._record["pid"])

    def service(self, name: str) -> Service:
        return next(service for service in self.services if service.name == name)

    def is_alive(self) -> bool:
        """Whether its supervisord runs."""
        return is_alive(self._record["pid"], self._record["pid_started"])

    def health(self) -> list[Health]:
        """How each service is, now."""
        states = self.supervisor.states() if self.is_alive() and self.supervisor.answers() else {}
        return [self._health_of(service, states) for service in self.services]

    def _health_of(self, service: Service, states: dict[str, tuple[str, str]]) -> Health:
        log = log_of(self.folder, service.name) if service.own else None
        if service.own:
            state, said = states.get(service.name, ("STOPPED", "supervisord is gone"))
            if state in ("STARTING", "BACKOFF"):  # BACKOFF: it ended at once, and is tried again
                return Health(service, "starting", said, log)
            if state != "RUNNING":
                word = "stopped" if state in ("STOPPED", "STOPPING") else "failed"
                return Health(service, word, said, log)
        if service.name == "worker":
            well, said = health.is_polling(self.service("prefect").url)
        else:
            well, said = health.answers(service)
        return Health(service, "healthy" if well else "not healthy", said, log)

    def processes(self) -> list[Any]:
        """Every process (of psutil) that it has started, and those that these have started."""
        import psutil

        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARKER) == self._record["id"] and process.pid != os.getpid():
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def wait_until(self, names: list[str], timeout_s: float, say: Say) -> None:
        """Waits until the services `names` are healthy; raises UpError with the end of a failed one's
        log.
        """
        end, told = time.monotonic() + timeout_s, set()
        while True:
            found = [one for one in self.health() if one.service.name in names]
            for one in found:
                if one.is_well and one.service.name not in told:
                    told.add(one.service.name)
                    say(f"{one.service.name} answers: {one.service.page or one.service.url}")
            late = [one for one in found if not one.is_well]
            if not late:
                return
            failed = [one for one in late if one.state == "failed"]
            if failed or not self.is_alive() or time.monotonic() > end:
                raise UpError(_explain((failed or late)[0], timeout_s))
            time.sleep(0.5)

    def stop(self, say: Say, timeout_s: float = 120.0) -> None:
        """Stops all that it has started, the worker and its flow runs first, and waits.

        Raises UpError where a process cannot be stopped.
        """
        import psutil

        if self.is_alive() and self.supervisor.answers():
            # While the servers are there: flow runs that are told to end say so.
            self._stop_worker(timeout_s)
            self.supervisor.shut_down()
        end = time.monotonic() + timeout_s
        while self.is_alive() and time.monotonic() < end:
            time.sleep(0.2)
        # Ray's own processes end with it, a moment later.
        _, left = psutil.wait_procs(self.processes(), timeout=10)
        for process in left:
            say(f"killed: process {process.pid} ({process.name()}) had not ended by itself")
            process.kill()
        _, left = psutil.wait_procs(left, timeout=10)
        if left:
            raise UpError(f"these processes could not be stopped: {[one.pid for one in left]}")
        forget(self)

    def _stop_worker(self, timeout_s: float) -> None:
        """Stops the worker once its flow runs have ended in good order; it would kill them at once.
        Meanwhile it is held, or it would begin those that wait."""
        import psutil

        pid = self.supervisor.pid_of("worker")
        if pid is None:
            return
        worker = psutil.Process(pid)
        worker.suspend()
        flows = {one.pid: process_start(one.pid) for one in worker.children()}
        for flow in flows:
            with suppress(ProcessLookupError):
                os.kill(flow, signal.SIGTERM)
        end = time.monotonic() + timeout_s
        # Not psutil's own wait: a worker that is held does not take notice of their ends.
        while any(start and is_alive(flow, start) for flow, start in flows.items()):
            if time.monotonic() > end:
                break
            time.sleep(0.2)
        self.supervisor.stop_program("worker", wait=False)
        worker.resume()
        with suppress(psutil.TimeoutExpired):
            worker.wait(timeout_s)


def _explain(one: Health, timeout_s: float) -> str:
    name, log = one.service.name, one.log
    why = one.detail or f"it did not answer within {timeout_s:g} s"
    if log is None:
        return f"{name} at {one.service.url} ({one.service.said_by}) cannot be used: {why}"
    try:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    except FileNotFoundError:
        tail = ""
    return f"{name} is {one.state}: {why}. The end of {log}:\n{tail}"


def state_folder(runs: Path) -> Path:
    """Where the services of the runs folder `runs` keep their state."""
    return runs.resolve() / ".up"


def find_up(runs: Path) -> Up | None:
    """The services that an `up` has started for `runs`, alive or not; None where there are none."""
    folder = state_folder(runs)
    try:
        return Up(folder, json.loads((folder / "up.json").read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UpError(f"{folder / 'up.json'} is damaged ({error}). Delete it, and `fp8rl up`") from None


def services_to_use(runs: Path) -> Up | None:
    """Services that are up and healthy; None where nothing is up.

    Raises UpError where some are up but not all of them healthy: runs would go here now and there
    later.
    """
    up = find_up(runs)
    if up is None or not up.is_alive():
        return None
    needed = [one for one in up.health() if one.service.name != "worker" and not one.is_well]
    if needed:
        said = ", ".join(f"{one.service.name} is {one.state} {one.detail}".strip() for one in needed)
        raise UpError(
            f"`fp8rl up` of {up.runs} is not healthy: {said}. `fp8rl status` shows more. `fp8rl down` "
            "and `fp8rl up` start anew; after `fp8rl down` runs use embedded services"
        )
    return up


def forget(up: Up) -> None:
    """Removes what says that it is up; logs and databases stay."""
    for name in ("up.json", "supervisord.pid", "ray_token"):
        (up.folder / name).unlink(missing_ok=True)
    shutil.rmtree(up._record["runtime"], ignore_errors=True)


@contextmanager
def one_at_a_time(runs: Path) -> Iterator[None]:
    """Keeps a second `up` or `down` of the same runs folder out; raises UpError there."""
    folder = state_folder(runs)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UpError(
                f"another `fp8rl up` or `fp8rl down` of {runs} is at work; wait for it"
            ) from None
        yield


def bring_up(
    runs: Path,
    config: UpConfig,
    *,
    yours: dict[str, tuple[str, str]],
    directory: Path,
    deploy: Callable[[Up], None],
    say: Say,
) -> Up:
    """Starts the services of `runs` and waits until they are healthy.

    yours: as in `make_plan`. directory: where the worker runs. deploy: puts the deployments onto the
    Prefect server, between its start and the worker's. Raises UpError; then nothing is left running.
    """
    runs = runs.resolve()
    runtime = Path(tempfile.mkdtemp(prefix="fp8rl-up-"))
    up = None
    try:
        plan = make_plan(config, runs, state_folder(runs), runtime, yours)
        require_free(plan.ports(config))
        databases.require_reachable(config, prefect=plan.own("prefect"), mlflow=plan.own("mlflow"))
        for service in plan.services:
            if not service.own and not (one := health.answers(service))[0]:
                raise UpError(f"{service.said_by}: {service.name} at {service.url} gives {one[1]}")
        write_token(state_folder(runs))
        file = write_config(state_folder(runs), runtime, plan.programs, directory)
        identity = uuid.uuid4().hex
        pid = start(file, {**os.environ, **plan.inherited, MARKER: identity})
        record = {
            **{"id": identity, "started": time.time(), "pid": pid, "pid_started": process_start(pid)},
            **{"runtime": str(runtime), "config": public(config)},
            **plan.record(),
        }
        up = Up(state_folder(runs), record)
        write_atomic(up.folder / "up.json", json.dumps(record, indent=1).encode())
        up.wait_until([s.name for s in up.services if s.name != "worker"], config.start_timeout_s, say)
        deploy(up)
        up.supervisor.start_program("worker")
        up.wait_until(["worker"], config.start_timeout_s, say)
        return up
    except BaseException:
        if up is not None:
            up.stop(say)
        shutil.rmtree(runtime, ignore_errors=True)
        raise
