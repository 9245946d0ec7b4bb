"""`fp8rl verify`: every digest of a run's folder, checked; what is damaged or missing, named."""

from dataclasses import dataclass, field
from pathlib import Path

from fp8rl import checkpoints
from fp8rl.identity import COPY, IDENTITY, IdentityError, is_whole, read_identity
from fp8rl.journal import ITERATION, WEIGHTS_FILE, JournalError
from fp8rl.position import PREPARATION, damaged_files, steps_of, uncommitted_files
from fp8rl.rewind import place
from fp8rl.runs import Run


@dataclass
class Verdict:
    """faults: what is damaged, missing or of another run, naming each file. unfinished: files of steps
    that never ended, which is no fault. checked: how much was looked at, by kind.
    """

    faults: list[str] = field(default_factory=list)
    unfinished: list[Path] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)


def verify_run(run: Run) -> Verdict:
    """Checks everything that `run` holds. Reads all of it; changes nothing."""
    verdict = Verdict()
    try:
        read_identity(run.folder)
    except IdentityError as error:
        verdict.faults.append(str(error))
        return verdict
    _identity(run, verdict)
    verdict.faults += damaged_files(run)
    verdict.checked["step records"] = sum(1 for _ in run.journal.steps())
    verdict.faults += _missing(run)
    verdict.unfinished = uncommitted_files(run)
    _checkpoints(run, verdict)
    _weights(run, verdict)
    return verdict


def _identity(run: Run, verdict: Verdict) -> None:
    for path in (run.folder / IDENTITY, run.folder / COPY):
        if not is_whole(path):
            verdict.faults.append(f"{path} is missing or damaged; `fp8rl resume` writes it again")
    if not run.is_recipe_file_whole():
        verdict.faults.append(
            f"{run.recipe_file} is missing, damaged or edited; {IDENTITY} holds the recipe that "
            "counts, and `fp8rl resume` writes the file again"
        )
    verdict.faults += [f"{path} is damaged; nothing depends on it" for path in run.damaged_attempts()]


def _missing(run: Run) -> list[str]:
    """Records that have to be there, since later ones are."""
    there = set(run.journal.steps())
    last = max([run.origin, *(number for number, _ in there)])
    missing = []
    for number in range(run.origin, last + 1):
        steps = list(steps_of(number, run.origin))
        if number == run.origin:
            steps = [*PREPARATION, *steps]
        if _was_evaluated(run, number):
            steps.append("evaluate")
        if number < last:
            steps.append(ITERATION)
        latest = max((place(step) for n, step in there if n == number), default=-1)
        missing += [
            (number, step)
            for step in steps
            if (number, step) not in there and (number < last or place(step) < latest)
        ]
    return [
        f"{run.journal.record_path(*step)} is missing, and later steps are there" for step in missing
    ]


def _was_evaluated(run: Run, number: int) -> bool:
    """Whether the iteration's record, where it is whole, has metrics of an evaluation."""
    if run.journal.fault(number, ITERATION):
        return False
    return any(name.startswith("val/") for name in run.journal.record(number, ITERATION).metrics)


def _checkpoints(run: Run, verdict: Verdict) -> None:
    versions = checkpoints.listing(run.folder)
    verdict.checked["checkpoints"] = len(versions)
    for version in versions:
        folder = checkpoints.checkpoint_folder(run.folder, version)
        try:
            found = checkpoints.verify(folder, run.id)
            step = "warm_start" if version == run.origin else "train"
            if version == run.origin and not run.journal.is_committed(version, step):
                continue  # a fork that has not begun
            if found.weights_digest != run.journal.record(version, step).output["weights"]:
                verdict.faults.append(f"{folder} holds other weights than {step} recorded")
        except (checkpoints.CheckpointError, JournalError) as error:
            verdict.faults.append(str(error))


def _weights(run: Run, verdict: Verdict) -> None:
    versions = sorted(number for number, step in run.journal.steps() if step == "requantize")
    count = 0
    for version in versions:
        # Tensors of older versions may have been cleaned away.
        has_tensors = (run.journal.weights_folder(version) / WEIGHTS_FILE).is_file()
        fault = _weights_fault(run, version, tensors=has_tensors or version == versions[-1])
        verdict.faults += [fault] if fault else []
        count += has_tensors
    verdict.checked["weight versions with tensors"] = count


def _weights_fault(run: Run, version: int, *, tensors: bool) -> str | None:
    from fp8rl.model.manifest import PublishedWeightsError, read_manifest
    from fp8rl.model.published import read_published

    folder = run.journal.weights_folder(version)
    path = folder / "manifest.json"
    try:
        manifest = read_manifest(folder)
        recorded = run.journal.record(version, "requantize").output["digest"]
        if manifest.digest != recorded or manifest.version != version:
            return f"{path} is not of the weights that requantize recorded"
        if tensors:
            read_published(folder, version)
    except (PublishedWeightsError, JournalError) as error:
        return str(error)
    return None
