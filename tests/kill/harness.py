"""Runs that are killed: commands in processes of their own, planted faults, the table of outcomes."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import requests

from benchmarks import record
from fp8rl.faults import VARIABLE
from fp8rl.runs import Run
from tests import compare
from tests.kill.cases import in_words

ROOT = Path(__file__).parents[2]
FP8RL = str(Path(sys.executable).parent / "fp8rl")
KILLED = -signal.SIGKILL
# How long a command may take before it counts as hanging.
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Ended:
    """A command that ended. text: all that it printed. reached: the planted faults that fired."""

    code: int
    text: str
    reached: tuple[str, ...]


@dataclass
class Row:
    """One kill. then: what happened after it. faults: what was wrong; empty where all is as it should
    be, that is bit for bit as in the run that was never killed."""

    arm: str
    what: str
    when: str
    then: str
    faults: list[str] = field(default_factory=list)
    duplicate_points: int = 0
    missing_points: int = 0


def clean_environment() -> dict[str, str]:
    """As a user's shell with nothing configured; HOME is the tests' own."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_") and k != VARIABLE}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Commands:
    """`fp8rl` commands on one runs folder, their output kept in `logs`."""

    def __init__(self, runs: Path, logs: Path) -> None:
        self.runs, self.logs = runs, logs
        logs.mkdir(parents=True, exist_ok=True)
        self._count = 0

    def run_of(self, name: str) -> Run:
        return Run(self.runs / name)

    def has(self, name: str) -> bool:
        return (self.runs / name / "run.json").exists()

    def call(self, *arguments: str, kill: tuple[str, ...] = ()) -> Ended:
        """Runs a command to its end. kill: points at which the process that gets there is killed, each
        once. Raises TimeoutExpired where it hangs."""
        with self.started(*arguments, kill=kill) as (process, end):
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            return end()

    @contextmanager
    def started(
        self, *arguments: str, kill: tuple[str, ...] = ()
    ) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], Ended]]]:
        """A running command, and a function that says how it ended."""
        environment, log, markers = self._prepare(kill)
        # Not a pipe: what a killed command leaves behind would keep it open.
        with log.open("w") as output:
            process = subprocess.Popen(
                [FP8RL, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=clean_environment() | environment,
            )
        yield process, lambda: _ended(process.wait(), log, markers)

    def _prepare(self, kill: tuple[str, ...]) -> tuple[dict[str, str], Path, list[Path]]:
        self._count += 1
        log = self.logs / f"{self._count:03d}.log"
        markers = [self.logs / f"{self._count:03d}.{i}.reached" for i in range(len(kill))]
        faults = [
            {"at": at, "do": "kill", "once": str(marker)}
            for at, marker in zip(kill, markers, strict=True)
        ]
        return ({VARIABLE: json.dumps(faults)} if faults else {VARIABLE: ""}), log, markers


def _ended(code: int, log: Path, markers: list[Path]) -> Ended:
    there = [marker for marker in markers if marker.exists()]
    names = (marker.read_text().split()[0] for marker in there)
    return Ended(code, log.read_text(errors="replace"), tuple(names))


class WarmCommands(Commands):
    """The same with standing services, each command forked from a process with warm imports."""

    def __init__(self, runs: Path, logs: Path, services: dict[str, str]) -> None:
        super().__init__(runs, logs)
        self._api = services["PREFECT_API_URL"]
        self._spawner = subprocess.Popen(
            [sys.executable, "-m", "tests.kill.spawner"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(logs / "spawner.log").open("w"),
            text=True,
            env=clean_environment() | services,
        )

    def call(self, *arguments: str, kill: tuple[str, ...] = ()) -> Ended:
        environment, log, markers = self._prepare(kill)
        request = {"arguments": arguments, "environment": environment, "log": str(log)}
        assert self._spawner.stdin is not None
        assert self._spawner.stdout is not None
        self._spawner.stdin.write(json.dumps(request) + "\n")
        self._spawner.stdin.flush()
        process = psutil.Process(int(self._spawner.stdout.readline()))
        try:
            process.wait(PATIENCE_S)
        except psutil.TimeoutExpired:
            process.kill()
            raise
        return _ended(int(self._spawner.stdout.readline()), log, markers)

    def unfinished_flow_runs(self) -> list[str]:
        """Ids of the flow runs that the Prefect server still shows as running or about to."""
        state = {"type": {"any_": ["RUNNING", "PENDING", "SCHEDULED", "PAUSED", "CANCELLING"]}}
        answer = requests.post(
            f"{self._api}/flow_runs/filter", json={"flow_runs": {"state": state}}, timeout=60
        )
        answer.raise_for_status()
        return [str(one["id"]) for one in answer.json()]

    def close(self) -> None:
        self._spawner.kill()
        self._spawner.wait()


@contextmanager
def server(command: list[str], health: str, log: Path, **environment: str) -> Iterator[Any]:
    """A server in a process of its own, from when it answers at the address `health`."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=clean_environment() | environment,
        )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not _answers(health):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        yield process
    finally:
        kill_tree(process.pid)
        process.wait()


def _answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=5).ok
    except requests.RequestException:
        return False


def kill_tree(pid: int) -> None:
    """Kills a process that the tests started, with what it started."""
    try:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


_RAY = """
import os, sys, ray
ray.init(address="local", num_cpus=len(os.sched_getaffinity(0)), include_dashboard=False,
         object_store_memory=200 * 2**20, log_to_driver=False, logging_level="ERROR")
open(sys.argv[1] + ".new", "w").write(ray.get_runtime_context().gcs_address)
os.rename(sys.argv[1] + ".new", sys.argv[1])
sys.stdin.read()
"""


@contextmanager
def standing_services(folder: Path) -> Iterator[dict[str, str]]:
    """A Prefect server and a Ray that stay while commands come and are killed; their settings."""
    folder.mkdir(parents=True, exist_ok=True)
    port, address = free_port(), folder / "ray"
    api = f"http://127.0.0.1:{port}/api"
    command = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    # Ray wants a token of everybody who connects.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ray = subprocess.Popen(
        [sys.executable, "-c", _RAY, str(address)],
        stdin=subprocess.PIPE,
        stdout=(folder / "ray.log").open("w"),
        stderr=subprocess.STDOUT,
        env=clean_environment() | token | {"RAY_USAGE_STATS_ENABLED": "0"},
    )
    try:
        with server(
            command, f"{api}/health", folder / "prefect.log", PREFECT_HOME=str(folder / "prefect")
        ):
            while not address.exists():
                assert ray.poll() is None, (folder / "ray.log").read_text()
                time.sleep(0.2)
            yield {"PREFECT_API_URL": api, "RAY_ADDRESS": address.read_text(), **token}
    finally:
        kill_tree(ray.pid)
        ray.wait()


def faults_of(reference: Run, run: Run, *, whole: bool) -> tuple[list[str], int, int]:
    """(what is wrong with `run`, duplicate points in MLflow, missing ones); with `whole` false only as
    far as it has come."""
    found = compare.run_differences(reference, run, whole=whole)
    if not whole:
        duplicate = compare.early_points(run)
        return found + [f"MLflow: {point} has no record" for point in duplicate], len(duplicate), 0
    if compare.prompts_of(run) != compare.prompts_of(reference):
        found.append("prompts: an iteration has others than the reference")
    found += compare.checkpoint_differences(reference, run)
    found += compare.mlflow_differences(reference, run)
    if compare.mlflow_status(run) != "FINISHED":
        found.append(f"MLflow: status {compare.mlflow_status(run)}")
    duplicate, missing = compare.point_faults(run)
    found += [f"MLflow: {point} twice" for point in duplicate]
    found += [f"MLflow: {point} missing" for point in missing]
    said = [attempt["state"] for attempt in run.attempts()]
    if "running" in said or said[-1] != "finished":
        found.append(f"attempts: {said}")
    return found, len(duplicate), len(missing)


def went_on(text: str) -> str:
    """What a resumed command says of where it goes on."""
    match = re.search(r"goes on at iteration (\d+);.*?and (\d+) replayed", text)
    if match is None:
        return "it began with the first step"
    replayed = f", {match[2]} training steps replayed" if match[2] != "0" else ""
    return f"resumed at iteration {match[1]}{replayed}"


class Table:
    """The outcome of every kill, in the order in which they were done."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(f"{row.what}: {row.when}: {row.then}: {row.faults or 'identical'}", flush=True)

    def failures(self) -> list[str]:
        return [
            f"{row.arm}, {row.what}, {row.when}: {'; '.join(row.faults)}"
            for row in self.rows
            if row.faults
        ]

    def write(self, document: Path, seconds: float) -> None:
        """Writes benchmarks/results/kill_matrix.json and the table for people."""
        values = {
            "cases": len(self.rows),
            "bit_identical": sum(not row.faults for row in self.rows),
            "duplicate_points": sum(row.duplicate_points for row in self.rows),
            "missing_points": sum(row.missing_points for row in self.rows),
            "failures": self.failures(),
            "seconds": round(seconds),
            "rows": [asdict(row) for row in self.rows],
        }
        record.write("kill_matrix", values)
        lines = [
            "# Kill matrix",
            "",
            "What happens when a process of a run is killed (SIGKILL) at a given moment. Made by",
            "`make test-kill`, which does every row anew and compares with a run that nobody killed:",
            "weights, samples, prompts, metrics, MLflow points and the last checkpoint, bit by bit.",
            "Times and speeds are the only values that may differ.",
            "",
            f"{date.today().isoformat()}: {values['bit_identical']} of {values['cases']} kills ended "
            f"bit for bit as the reference; {values['duplicate_points']} duplicate and "
            f"{values['missing_points']} missing MLflow points; {values['seconds']} s in all.",
            "",
            "| Arm | Killed | When | What happened then | Outcome |",
            "| --- | --- | --- | --- | --- |",
        ]
        for row in self.rows:
            outcome = "identical" if not row.faults else "**" + "; ".join(row.faults)[:300] + "**"
            lines.append(f"| {row.arm} | {row.what} | {row.when} | {row.then} | {outcome} |")
        document.write_text("\n".join(lines) + "\n")


def flow_chain(
    commands: Commands,
    table: Table,
    reference: Run,
    name: str,
    begin: list[str],
    points: tuple[str, ...],
) -> None:
    """Kills the flow process of the run `name` at one point after the other, then has it end.

    begin: the command that begins the run. Compares after each kill and, with everything, at the end;
    what is wrong at the end counts against every row.
    """
    arm, rows = reference.recipe.arm or "", []
    runs_folder = str(commands.runs)

    def command() -> list[str]:
        return ["resume", name, f"--runs-dir={runs_folder}"] if commands.has(name) else begin

    for point in points:
        ended = commands.call(*command(), kill=(point,))
        row = Row(arm, "flow process", in_words(point), "")
        if rows and not rows[-1].then:
            rows[-1].then = went_on(ended.text)
            table.add(rows[-1])
        rows.append(row)
        if not ended.reached or ended.code != KILLED:
            row.faults.append(f"not killed there: exit code {ended.code}: {ended.text[-500:]}")
            break
        if not commands.has(name):
            row.then = "no run of that name is there; the same command was given again"
            table.add(row)
        else:
            row.faults, row.duplicate_points, _ = faults_of(
                reference, commands.run_of(name), whole=False
            )
    ended = commands.call(*command())
    if not rows[-1].then:
        rows[-1].then = went_on(ended.text)
        table.add(rows[-1])
    wrong, duplicate, missing = [f"exit code {ended.code}: {ended.text[-500:]}"], 0, 0
    if ended.code == 0:
        wrong, duplicate, missing = faults_of(reference, commands.run_of(name), whole=True)
    for row in rows:
        row.faults += [f"at the end: {fault}" for fault in wrong]
    rows[-1].duplicate_points += duplicate
    rows[-1].missing_points += missing
