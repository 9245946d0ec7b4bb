"""The run folder: what each step produced, committed whole or not at all.

    runs/<run>/run.json                        name, recipe digest, when, by which process
    runs/<run>/recipe.yaml                     the resolved recipe
    runs/<run>/iterations/00003/rollouts.parquet        what a step produced
    runs/<run>/iterations/00003/steps/rollout.json      its record: output, digests, inputs

A step writes its data beside, then its record; both appear by an atomic rename, the record last.
A file without a record was never committed.
"""

import hashlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WEIGHTS_FILE = "weights.safetensors"  # of a published version
MODEL_FILE = "model.safetensors"  # of initial weights, as Hugging Face names it


class RunExistsError(RuntimeError):
    """A run of that name is there already."""


class JournalError(RuntimeError):
    """A record or its data is missing or not what it should be."""


def write_atomic(path: Path, content: bytes) -> None:
    """Writes `path` so that it holds either its old content or all of `content`, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@dataclass(frozen=True)
class StepRecord:
    """What a step did. Small: tensors and tables are in the files that it names.

    files: {file name: sha256}, beside the record. inputs: versions and digests that it read.
    metrics: numbers for tracking. seconds: wall time. t_ms: when it was committed, Unix ms.
    """

    step: str
    iteration: int
    seconds: float
    files: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    output: dict[str, Any] = field(default_factory=dict)
    t_ms: int = 0


class Journal:
    """The folder of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def weights_folder(self, version: int) -> Path:
        """The folder of a published weight version."""
        return self.folder / "weights" / f"v{version:05d}"

    def drop_weights_before(self, version: int) -> None:
        """Deletes the tensors of versions before `version`; their manifests stay."""
        for folder in self.folder.glob("weights/v*"):
            if int(folder.name[1:]) < version:
                (folder / WEIGHTS_FILE).unlink(missing_ok=True)

    @staticmethod
    def create(runs: Path, name: str, recipe_yaml: str, about: dict[str, Any]) -> "Journal":
        """Makes the folder of a new run.

        Raises RunExistsError, saying what is there, where the name is taken: two runs are never
        mixed and none is overwritten.
        """
        folder = runs / name
        runs.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
        except FileExistsError:
            raise RunExistsError(Journal(folder).describe()) from None
        journal = Journal(folder)
        write_atomic(folder / "recipe.yaml", recipe_yaml.encode())
        write_atomic(folder / "run.json", json.dumps({"name": name, **about}, indent=1).encode())
        return journal

    def describe(self) -> str:
        """What is in the folder of a run that exists, and what the user can do."""
        lines = [f"a run named {self.folder.name!r} exists in {self.folder.parent}:"]
        about = self.about()
        if about is None:
            lines.append("  it has no run.json: it was killed while it was being created")
        else:
            lines.append(f"  started {about['started']}, recipe {about['recipe_digest'][:12]}")
            lines.append(f"  last committed step: {self._last_step()}")
            lines.append(f"  state: {self._state(about)}")
        lines.append(
            "Nothing was changed. Start under another name (name=...), or remove "
            f"{self.folder} yourself. Resuming a run is not built yet."
        )
        return "\n".join(lines)

    def about(self) -> dict[str, Any] | None:
        path = self.folder / "run.json"
        return json.loads(path.read_text()) if path.is_file() else None

    def finish(self, state: str) -> None:
        """Records how the run ended: finished, failed or cancelled."""
        write_atomic(self.folder / "end.json", json.dumps({"state": state}).encode())

    def _state(self, about: dict[str, Any]) -> str:
        end = self.folder / "end.json"
        if end.is_file():
            return str(json.loads(end.read_text())["state"])
        host = about["machine"]["host"]
        if host != socket.gethostname():
            return f"unknown: it was started on {host}; look there whether process {about['pid']} lives"
        if _is_alive(about["pid"], about["pid_started"]):
            return f"running, process {about['pid']}"
        return "killed: its process is gone and it did not say how it ended"

    def _last_step(self) -> str:
        paths = self.folder.glob("iterations/*/steps/[!.]*.json")
        records = [json.loads(path.read_text()) for path in paths]
        if not records:
            return "none"
        last = max(records, key=lambda record: record["t_ms"])
        if last["step"] == "iteration":
            return f"iteration {last['iteration']} is complete"
        return f"{last['step']} of iteration {last['iteration']}"

    def step_folder(self, iteration: int) -> Path:
        return self.folder / "iterations" / f"{iteration:05d}"

    def _record_path(self, iteration: int, step: str) -> Path:
        return self.step_folder(iteration) / "steps" / f"{step}.json"

    def commit(self, record: StepRecord, files: dict[str, bytes]) -> StepRecord:
        """Writes `files` beside the record, then the record with their digests; returns it."""
        folder = self.step_folder(record.iteration)
        digests = {}
        for name, content in files.items():
            write_atomic(folder / name, content)
            digests[name] = hashlib.sha256(content).hexdigest()
        values = asdict(record) | {"files": digests, "t_ms": int(time.time() * 1000)}
        content = json.dumps(values, indent=1).encode()
        write_atomic(self._record_path(record.iteration, record.step), content)
        return StepRecord(**values)

    def record(self, iteration: int, step: str) -> StepRecord:
        """The committed record of a step; raises JournalError where there is none."""
        path = self._record_path(iteration, step)
        if not path.is_file():
            raise JournalError(f"{path} is missing: step {step} of iteration {iteration} never ended")
        return StepRecord(**json.loads(path.read_text()))

    def read_file(self, iteration: int, step: str, name: str) -> bytes:
        """A step's data file, checked against the digest in its record."""
        wanted = self.record(iteration, step).files[name]
        path = self.step_folder(iteration) / name
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != wanted:
            raise JournalError(f"{path} is not what {step}.json recorded (missing or changed)")
        return content


def process_start(pid: int) -> float | None:
    """When process `pid` started, Unix seconds; None where there is none. Tells a reused number."""
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


def _is_alive(pid: int, started: float) -> bool:
    now = process_start(pid)
    return now is not None and abs(now - started) < 1.0
