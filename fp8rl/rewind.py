"""Going back in a run: what came after a step is set aside, never deleted.

runs/<run>/set_aside/<time>/...     the same paths as in the run folder
"""

import time
from pathlib import Path

from fp8rl import checkpoints
from fp8rl.files import disk_error, fsync_folder
from fp8rl.journal import ITERATION, Journal
from fp8rl.lock import require_held
from fp8rl.report import PUBLISHING, STEPS
from fp8rl.runs import Run

# A person's word after a pause or a stop of the guard: it stands for the train step it was given on.
GUARD_ANSWER = "guard_answer"
_AFTER_STEPS = ("evaluate", ITERATION, GUARD_ANSWER)


class RewindError(ValueError):
    """A step to go back to that the run does not have."""


def parse_step(text: str, current: int) -> tuple[int, str]:
    """(iteration, step) of "train@4", or of "train" in iteration `current`."""
    step, at, number = text.partition("@")
    known = (*STEPS, *_AFTER_STEPS)
    if step not in known or (at and not number.isdecimal()):
        raise RewindError(
            f"--from-step {text}: write a step and an iteration, for example train@4; "
            f"steps: {', '.join(known)}"
        )
    return (int(number) if at else current), step


def set_aside(folder: Path, paths: list[Path]) -> None:
    """Moves `paths` (files and folders of the run in `folder`) into set_aside, in the order given.

    Raises DiskFullError where there is no room for the names; what was not moved is where it was.
    """
    require_held(folder)
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d}"
    for path in paths:
        target = folder / "set_aside" / stamp / path.relative_to(folder)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
            fsync_folder(path.parent)
        except OSError as error:
            raise disk_error(error, target) from error


def rewind(run: Run, iteration: int, step: str) -> int:
    """Sets aside `step` of `iteration` and all that came after it; returns how many steps that were.

    Records go first and the latest of them before earlier ones, so that at every moment of it the
    journal is one of an earlier time. Raises RewindError where the run has nothing from there on.
    """
    journal = run.journal
    first = PUBLISHING[0]  # of the iteration that the run starts from
    if (iteration, place(step)) < (run.origin, place(first)):
        raise RewindError(
            f"run {run.name!r} begins with {first} of iteration {run.origin}: there is no {step} of "
            f"iteration {iteration} in it"
        )
    chosen = sorted(
        (
            (number, place(name), name)
            for number, name in journal.steps()
            if (number, place(name)) >= (iteration, place(step))
        ),
        reverse=True,
    )
    if not chosen:
        raise RewindError(
            f"run {run.name!r} has no {step} of iteration {iteration}, and nothing after it: its last "
            f"committed step is {run.last_step()}"
        )
    files = [path for number, _, name in chosen for path in files_named_by(journal, number, name)]
    gone = [journal.record_path(number, name) for number, _, name in chosen]
    # A checkpoint stays as long as the weights that it is of; so a fork keeps its first one.
    first_checkpoint = iteration + (place(step) > place("train"))
    gone += [
        checkpoints.checkpoint_folder(run.folder, version)
        for version in reversed(checkpoints.listing(run.folder))
        if version >= first_checkpoint
    ]
    first_weights = iteration + (place(step) > place("requantize"))
    gone += [
        folder
        for folder in sorted(run.folder.glob("weights/v[0-9]*"), reverse=True)
        if int(folder.name[1:]) >= first_weights
    ]
    set_aside(run.folder, [*gone, *dict.fromkeys(files)])
    return len(chosen)


def place(step: str) -> int:
    """Where a step stands in its iteration. A chunk of a rollout belongs to it, and what prepares the
    run comes before every step.
    """
    name = step.partition(".")[0]
    steps = (*STEPS, *_AFTER_STEPS)
    return steps.index(name) if name in steps else -1


def files_named_by(journal: Journal, number: int, step: str) -> list[Path]:
    """Files of iteration `number` that a step's record names; the record may be damaged."""
    text = journal.record_path(number, step).read_text(errors="replace")
    folder = journal.step_folder(number)
    prefix = folder.relative_to(journal.folder).as_posix()
    return [p for p in folder.glob("[!.]*") if p.is_file() and f'"{prefix}/{p.name}"' in text]
