"""`fp8rl clean`: what in the runs folder can go, and letting it go."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from fp8rl import checkpoints
from fp8rl.journal import WEIGHTS_FILE
from fp8rl.lock import kept_free
from fp8rl.position import uncommitted_files
from fp8rl.retention import KEPT_VERSIONS, old_checkpoints
from fp8rl.runs import Run


@dataclass(frozen=True)
class Removable:
    """A file or folder that no run needs. why: in words. size: bytes."""

    path: Path
    why: str
    size: int


def removable(run: Run) -> list[Removable]:
    """What of `run` can go; nothing of a run that is running.

    Kept are the journal, the tensors of the last versions, and the checkpoints that the recipe keeps.
    """
    if not run.state().is_over:
        return []
    chosen: list[tuple[Path, str]] = []
    aside = run.folder / "set_aside"
    if aside.is_dir():
        chosen.append((aside, "set aside by going back to an earlier step"))
    for version in old_checkpoints(run):
        folder = checkpoints.checkpoint_folder(run.folder, version)
        chosen.append((folder, "checkpoint beyond checkpoint.keep_last and keep_best"))
    leftovers = [*run.folder.glob("checkpoints/.*"), *run.folder.rglob(".*.tmp")]
    chosen += [(path, "left by a process that was killed while writing") for path in leftovers]
    chosen += [(path, "of a step that never ended") for path in uncommitted_files(run)]
    versions = sorted(run.folder.glob(f"weights/v*/{WEIGHTS_FILE}"))
    chosen += [
        (path, "tensors of an older weight version; its manifest stays")
        for path in versions[:-KEPT_VERSIONS]
    ]
    paths = {path: why for path, why in chosen if not any(p in path.parents for p, _ in chosen)}
    return [Removable(path, why, size_of(path)) for path, why in sorted(paths.items())]


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def remove(run: Run, items: list[Removable]) -> int:
    """Deletes what of `items` can still go; returns how many bytes that freed.

    No process can begin to write to the run meanwhile. Raises LockedError where one does already.
    """
    with kept_free(run.folder):
        going = [item for item in removable(run) if item in items]
        for item in going:
            if item.path.is_dir():
                shutil.rmtree(item.path)
            else:
                item.path.unlink(missing_ok=True)
    return sum(item.size for item in going)
