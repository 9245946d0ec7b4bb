"""What MLflow is to show of a run, and what of it has been pushed: files in the run folder.

    runs/<run>/tracking/state.json        which MLflow run, what it is to show, what it has
    runs/<run>/tracking/artifacts/<name>  artifacts

If state.json is lost, all is pushed again.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fp8rl.files import sha256, write_atomic
from fp8rl.journal import StepRecord


@dataclass
class State:
    """state.json.

    status, reason, ended_ms (Unix ms), tags, inputs (of prepare_data): what MLflow is to show. rebuild:
    a new MLflow run is to be made. superseded: MLflow runs that are to be deleted. pushed: what
    `mlflow_run` has: digests of params, tags, inputs and artifacts, the last iteration and its time,
    the status.
    """

    mlflow_run: str | None = None
    status: str = "RUNNING"
    reason: str | None = None
    ended_ms: int | None = None
    tags: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    rebuild: bool = False
    superseded: list[str] = field(default_factory=list)
    pushed: dict[str, Any] = field(default_factory=dict)


class Queue:
    """The folder `tracking` of a run; one process at a time writes to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.state = self._read()
        self._digests: dict[str, str] | None = None

    def _read(self) -> State:
        try:
            return State(**json.loads((self._folder / "state.json").read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return State()

    def save(self) -> None:
        """Writes the state. Raises DiskFullError."""
        content = json.dumps(asdict(self.state), indent=1)
        write_atomic(self._folder / "state.json", content.encode())

    def want(self, status: str, reason: str | None, ended_ms: int | None) -> None:
        """Notes how the run is to be shown."""
        self.state.status, self.state.reason, self.state.ended_ms = status, reason, ended_ms

    def status(self) -> list[Any]:
        return [self.state.status, self.state.reason, self.state.ended_ms]

    def has(self, what: str, value: Any) -> bool:
        """Whether `value` is what was pushed last as `what`."""
        return bool(self.state.pushed.get(what) == value)

    def pushed(self, what: str, value: Any) -> None:
        """Notes that the MLflow run has `value` as its `what`."""
        self.state.pushed[what] = value
        self.save()

    # Artifacts.

    def path(self, name: str) -> Path:
        return self._folder / "artifacts" / name

    def write(self, name: str, content: str | bytes) -> None:
        """Keeps an artifact, text or a file's bytes, replacing an older one.

        Raises ValueError for a name that is not a plain relative path, and DiskFullError.
        """
        if "\\" in name or any(not part or part.startswith(".") for part in name.split("/")):
            raise ValueError(f"artifact name {name!r} is not a plain relative path")
        digests = self._artifacts()
        content = content.encode() if isinstance(content, str) else content
        write_atomic(self.path(name), content)
        digests[name] = sha256(content)

    def _artifacts(self) -> dict[str, str]:
        """Digest by name of all that is in the folder."""
        if self._digests is None:
            folder = self._folder / "artifacts"
            files = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
            self._digests = {
                name.as_posix(): sha256(path.read_bytes())
                for name, path in sorted(files.items())
                if not any(part.startswith(".") for part in name.parts)
            }
        return self._digests

    def pending_artifacts(self) -> dict[str, str]:
        """Digest by name of those that the MLflow run does not have like this."""
        there = self.state.pushed.get("artifacts", {})
        return {name: digest for name, digest in self._artifacts().items() if there.get(name) != digest}

    def pushed_artifact(self, name: str, digest: str) -> None:
        self.pushed("artifacts", self.state.pushed.get("artifacts", {}) | {name: digest})

    def is_table(self, name: str) -> bool:
        """Whether an artifact is what `Tracker.put_table` writes, which needs a tag to be shown so."""
        if not name.endswith(".json"):
            return False
        content = json.loads(self.path(name).read_text())
        return isinstance(content, dict) and set(content) == {"columns", "data"}

    # Iterations.

    def pending_records(self, records: list[StepRecord]) -> list[StepRecord]:
        """Those after the iteration that was pushed last; all, where a new run is to be made."""
        last = None if self.state.rebuild else self.state.pushed.get("last")
        return [record for record in records if last is None or record.iteration > last[0]]

    def pushed_record(self, record: StepRecord) -> None:
        self.pushed("last", [record.iteration, record.t_ms])

    def is_taken_back(self, records: list[StepRecord]) -> bool:
        """Whether the iteration that was pushed last is gone, or was done again since."""
        last = self.state.pushed.get("last")
        return last is not None and last not in [[r.iteration, r.t_ms] for r in records]
