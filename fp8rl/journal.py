"""The journal of a run: what each step produced, committed whole or not at all.

    runs/<run>/iterations/00003/rollouts.parquet        what a step produced
    runs/<run>/iterations/00003/steps/rollout.json      its record: digests, inputs, metrics

A step writes its data beside, then its record; both appear by an atomic rename, the record last. A
file without a record was never committed, and a record is believed only if its own digest, its place
and its run are right. Only the process that holds the run's lock commits.
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fp8rl import faults
from fp8rl.files import file_sha256, from_sealed, sha256, to_sealed, write_atomic
from fp8rl.identity import read_identity
from fp8rl.lock import require_held

WEIGHTS_FILE = "weights.safetensors"  # of a published version
MODEL_FILE = "model.safetensors"  # of initial weights, as Hugging Face names it

# The record of a whole iteration, committed after those of its steps.
ITERATION = "iteration"


class JournalError(RuntimeError):
    """A record or its data is missing or not what it should be. The text names the file."""


@dataclass(frozen=True)
class StepRecord:
    """What a step did. Small: tensors and tables are in the files that it names.

    files: {path in the run folder: sha256}. inputs: digests and versions of what it came from.
    metrics: numbers for tracking. seconds: wall time. t_ms: when it was committed, Unix ms. run_id:
    of the run that committed it.
    """

    step: str
    iteration: int
    seconds: float
    files: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    output: dict[str, Any] = field(default_factory=dict)
    t_ms: int = 0
    run_id: str = ""

    def digest_of(self, name: str) -> str:
        """sha256 of the step's file called `name`; raises JournalError where it has none."""
        for path, digest in self.files.items():
            if path.rpartition("/")[2] == name:
                return digest
        raise JournalError(f"step {self.step} of iteration {self.iteration} has no file {name}")

    def to_json(self) -> bytes:
        return to_sealed(asdict(self))

    @staticmethod
    def from_json(content: bytes, where: Path) -> "StepRecord":
        """Reads what `to_json` wrote; raises JournalError where a value of it is another."""
        try:
            return StepRecord(**from_sealed(content))
        except (ValueError, TypeError):
            raise JournalError(f"{where} is damaged: it is not a record that a step wrote") from None


class Journal:
    """The journal in the run folder `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def run_id(self) -> str:
        """The run's own id, which no other run has; raises IdentityError where run.json is lost."""
        return str(read_identity(self.folder)["id"])

    # Where things are.

    def step_folder(self, iteration: int) -> Path:
        return self.folder / "iterations" / f"{iteration:05d}"

    def record_path(self, iteration: int, step: str) -> Path:
        return self.step_folder(iteration) / "steps" / f"{step}.json"

    def weights_folder(self, version: int) -> Path:
        """The folder of a published weight version."""
        return self.folder / "weights" / f"v{version:05d}"

    def drop_weights_before(self, version: int) -> None:
        """Deletes the tensors of versions before `version`; their manifests stay."""
        for folder in self.folder.glob("weights/v*"):
            if int(folder.name[1:]) < version:
                (folder / WEIGHTS_FILE).unlink(missing_ok=True)

    # Committing.

    def commit(
        self, record: StepRecord, files: dict[str, bytes], written: tuple[Path, ...] = ()
    ) -> StepRecord:
        """Writes `files` beside the record, then the record with their digests; returns it.

        written: files of the run folder that are there already and belong to the step. The time of
        the commit is set unless the record has one. Raises LockedError where another process has
        taken the run over, and DiskFullError; then the step is not committed.
        """
        require_held(self.folder)
        label = f"{record.step}:{record.iteration}"
        folder = self.step_folder(record.iteration)
        digests = {self._relative(path): file_sha256(path) for path in written}
        for name, content in files.items():
            write_atomic(folder / name, content)
            digests[self._relative(folder / name)] = sha256(content)
        faults.point(f"commit:{label}:before-record")
        values = asdict(record) | {
            "files": digests,
            "t_ms": record.t_ms or int(time.time() * 1000),
            "run_id": self.run_id,
        }
        done = StepRecord(**values)
        write_atomic(self.record_path(record.iteration, record.step), done.to_json())
        faults.point(f"commit:{label}:committed")
        # As it is read back: JSON knows no tuples.
        return self.record(record.iteration, record.step)

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def forget(self, iteration: int, step: str) -> None:
        """Deletes the record of a step that another one has taken in, then its files.

        Those of a damaged record stay: files of no step, which `fp8rl clean` deletes.
        """
        require_held(self.folder)
        try:
            files = tuple(self.record(iteration, step).files)
        except JournalError:
            files = ()
        self.record_path(iteration, step).unlink()
        for name in files:
            (self.folder / name).unlink(missing_ok=True)

    # Reading.

    def is_committed(self, iteration: int, step: str) -> bool:
        """Whether the step has a record, whole or not."""
        return self.record_path(iteration, step).is_file()

    def record(self, iteration: int, step: str) -> StepRecord:
        """The committed record of a step.

        Raises JournalError where there is none, where it is damaged, and where it stands in another
        place or run than it was committed in.
        """
        path = self.record_path(iteration, step)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise JournalError(
                f"{path} is missing: step {step} of iteration {iteration} never ended"
            ) from None
        except OSError as error:
            raise JournalError(f"{path} is not readable: {error.strerror}") from None
        record = StepRecord.from_json(content, path)
        if record.run_id != self.run_id:
            raise JournalError(f"{path} was left by another run (id {record.run_id})")
        if (record.iteration, record.step) != (iteration, step):
            raise JournalError(
                f"{path} holds step {record.step} of iteration {record.iteration}: it was moved here"
            )
        return record

    def whole(self, iteration: int, step: str) -> StepRecord:
        """As `record`, with every file of the step checked against its digest."""
        record = self.record(iteration, step)
        for name, wanted in record.files.items():
            path = self.folder / name
            if not path.is_file():
                raise JournalError(f"{path} is missing; step {step} of iteration {iteration} wrote it")
            if file_sha256(path) != wanted:
                raise JournalError(
                    f"{path} was changed after step {step} of iteration {iteration} wrote it"
                )
        return record

    def fault(self, iteration: int, step: str, *, record_only: bool = False) -> str | None:
        """What is wrong with a step's record or its files, naming the file; None where all is whole."""
        try:
            (self.record if record_only else self.whole)(iteration, step)
        except JournalError as error:
            return str(error)
        return None

    def read_file(self, iteration: int, step: str, name: str) -> bytes:
        """A step's data file, checked against the digest in its record."""
        wanted = self.record(iteration, step).digest_of(name)
        path = self.step_folder(iteration) / name
        content = path.read_bytes() if path.is_file() else b""
        if sha256(content) != wanted:
            raise JournalError(f"{path} is not what {step}.json recorded (missing or changed)")
        return content

    def steps(self) -> Iterator[tuple[int, str]]:
        """(iteration, step) of every record that is there, whole or not, in no order of time."""
        for path in sorted(self.folder.glob("iterations/*/steps/[!.]*.json")):
            yield int(path.parent.parent.name), path.stem

    def iterations(self) -> list[StepRecord]:
        """The records of the whole iterations, in order; raises JournalError as `record`."""
        return [self.record(n, step) for n, step in self.steps() if step == ITERATION]
