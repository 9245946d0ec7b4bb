"""Checkpoints of the learner on disk: layout, manifest, verification, retention. Without torch.

    runs/<run>/checkpoints/00005/                  after iteration 5: weight version 5
    runs/<run>/checkpoints/00005/learner/          tensors, written by torch.distributed.checkpoint
    runs/<run>/checkpoints/00005/state.json        everything that is not a tensor
    runs/<run>/checkpoints/00005/manifest.json     size and sha256 of each file; written last

A checkpoint is built in `.00005.<pid>.tmp` and renamed when it is whole, so a folder named 00005 was
whole once; `verify` tells whether it still is. Names that begin with a dot are never checkpoints.
fp8rl/learner/checkpoint.py writes and loads what is in it.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fp8rl import files
from fp8rl.lock import may_be_writing

MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = "learner"
_FORMAT = 1
_WHOLE = re.compile(r"\d{5,}")
_LEFTOVER = re.compile(r"\.\d{5,}(?:\.(?P<pid>\d+))?\.(?:tmp|old)")
_ADVICE = "remove this folder, or resume from an older checkpoint"


class CheckpointError(RuntimeError):
    """A checkpoint that is damaged, of another run, or does not fit: the text names what is wrong."""


@dataclass(frozen=True)
class Checkpoint:
    """What a manifest says. version: of the weights. bytes: of all files but the manifest.

    weights_digest: of the FP32 masters. recipe_digest: of the recipe that trained them.
    """

    folder: Path
    version: int
    run_id: str
    weights_digest: str
    recipe_digest: str
    bytes: int


def checkpoints_folder(run_folder: Path) -> Path:
    """Where a run's checkpoints are."""
    return run_folder / "checkpoints"


def checkpoint_folder(run_folder: Path, version: int) -> Path:
    """The folder of the checkpoint of weight `version`."""
    return checkpoints_folder(run_folder) / f"{version:05d}"


def building_folder(folder: Path) -> Path:
    """Where this process builds the checkpoint that is to become `folder`."""
    return folder.with_name(f".{folder.name}.{os.getpid()}.tmp")


def _fault(folder: Path, file: str, what: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {folder}: {file} {what}; {_ADVICE}")


def _files_in(folder: Path) -> dict[str, Path]:
    """Every file below `folder` but the manifest, by relative path."""
    paths = (path for path in folder.rglob("*") if not path.is_dir())
    found = {path.relative_to(folder).as_posix(): path for path in sorted(paths)}
    found.pop(MANIFEST, None)
    return found


def write_manifest(
    building: Path, *, run_id: str, version: int, weights_digest: str, recipe_digest: str
) -> None:
    """Writes the manifest of all files in `building`.

    Raises OSError where a file cannot be read, files.DiskFullError where there is no room.
    """
    values = {
        "format": _FORMAT,
        "run_id": run_id,
        "version": version,
        "weights_digest": weights_digest,
        "recipe_digest": recipe_digest,
        "files": {
            name: {"sha256": files.file_sha256(path), "bytes": path.stat().st_size}
            for name, path in _files_in(building).items()
        },
    }
    files.write_atomic(building / MANIFEST, files.to_sealed(values))


def _read(folder: Path) -> dict[str, Any]:
    """The manifest's values, checked against their own digest and the folder's name."""
    try:
        values = files.from_sealed((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        what = "is missing" if folder.is_dir() else "is missing: there is no such checkpoint"
        raise _fault(folder, MANIFEST, what) from None
    except OSError as error:
        raise _fault(folder, MANIFEST, f"cannot be read ({error.strerror})") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise _fault(folder, MANIFEST, "is damaged: not whole JSON") from None
    except ValueError:
        raise _fault(folder, MANIFEST, "is damaged: it does not match its own digest") from None
    if values.get("format") != _FORMAT:
        what = f"has format {values.get('format')!r}; this fp8rl reads format {_FORMAT}"
        raise _fault(folder, MANIFEST, what)
    if folder.name != f"{values['version']:05d}":
        what = f"is of weight version {values['version']}: the folder was renamed"
        raise _fault(folder, MANIFEST, what)
    return values


def _checkpoint(folder: Path, values: Mapping[str, Any]) -> Checkpoint:
    return Checkpoint(
        folder,
        version=values["version"],
        run_id=values["run_id"],
        weights_digest=values["weights_digest"],
        recipe_digest=values["recipe_digest"],
        bytes=sum(entry["bytes"] for entry in values["files"].values()),
    )


def read_manifest(folder: Path) -> Checkpoint:
    """What the manifest in `folder` says; the other files are not looked at.

    Raises CheckpointError where the manifest is missing, damaged or of another folder or format.
    """
    return _checkpoint(folder, _read(folder))


def read_state(folder: Path) -> dict[str, Any]:
    """All that the checkpoint in `folder` keeps besides tensors; `verify` says whether it is whole.

    Raises CheckpointError where it is missing or not JSON.
    """
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_bytes())
    except (OSError, ValueError) as error:
        raise _fault(folder, STATE, f"cannot be read ({error})") from error
    return state


def verify(folder: Path, run_id: str | None) -> Checkpoint:
    """The checkpoint in `folder`, after a check of every file's size and sha256.

    run_id: of the run that it has to belong to; any where None.
    Raises CheckpointError naming the first file that is missing, not readable, changed or too many.
    """
    values = _read(folder)
    if run_id is not None and values["run_id"] != run_id:
        what = f"is of run {values['run_id']}, not of run {run_id}: it was left or copied here"
        raise _fault(folder, MANIFEST, what)
    found = _files_in(folder)
    for name, entry in values["files"].items():
        if name not in found:
            raise _fault(folder, name, "is missing")
        try:
            size = found[name].stat().st_size
            if size != entry["bytes"]:
                what = f"is damaged: {size} bytes, the manifest says {entry['bytes']}"
                raise _fault(folder, name, what)
            if files.file_sha256(found[name]) != entry["sha256"]:
                raise _fault(folder, name, "is damaged: its sha256 is not the manifest's")
        except OSError as error:
            raise _fault(folder, name, f"cannot be read ({error.strerror})") from error
    for name in found.keys() - values["files"].keys():
        raise _fault(folder, name, "is not in the manifest: something else wrote here")
    return _checkpoint(folder, values)


def listing(run_folder: Path) -> list[int]:
    """Weight versions that have a checkpoint folder, ascending; none of them is verified."""
    folder = checkpoints_folder(run_folder)
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    return sorted(int(n) for n in names if _WHOLE.fullmatch(n) and n == f"{int(n):05d}")


def newest_whole(run_folder: Path, *, at_most: int, run_id: str) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint of run `run_id` that verifies, of version `at_most` or before.

    Beside it one line for each newer one that was passed over, naming the file and its fault.
    """
    passed_over: list[str] = []
    for version in reversed(listing(run_folder)):
        if version <= at_most:
            try:
                return verify(checkpoint_folder(run_folder, version), run_id), passed_over
            except CheckpointError as error:
                passed_over.append(str(error))
    return None, passed_over


def choose(run_folder: Path, version: int | None, run_id: str) -> tuple[Checkpoint | None, str]:
    """The whole checkpoint of `version` (None: the newest one) of run `run_id`; beside it, where there
    is none, what there is and what is wrong with it, in words."""
    newest = 10**9 if version is None else version
    found, faults = newest_whole(run_folder, at_most=newest, run_id=run_id)
    if found is not None and version in (None, found.version):
        return found, ""
    there = ", ".join(map(str, listing(run_folder))) or "none"
    return None, f"(there: {there}). {' '.join(faults)}".rstrip()


def to_drop(
    versions: Sequence[int],
    *,
    keep_last: int,
    keep_best: int,
    metric: Mapping[int, float],
    mode: Literal["max", "min"],
    keep: set[int],
) -> list[int]:
    """Which of `versions` retention deletes, ascending.

    Kept are the newest `keep_last`, the `keep_best` best by `metric` (of equals the newer; versions
    without a metric, or with NaN, are never among the best), and those in `keep`.
    """
    newest_first = sorted(set(versions), reverse=True)
    sign = 1 if mode == "max" else -1
    measured = [v for v in newest_first if v in metric and not math.isnan(metric[v])]
    best_first = sorted(measured, key=lambda v: sign * metric[v], reverse=True)  # stable: newer first
    kept = {*newest_first[:keep_last], *best_first[:keep_best], *keep}
    return [v for v in reversed(newest_first) if v not in kept]


def drop(run_folder: Path, version: int) -> None:
    """Deletes the checkpoint of weight `version`; nothing where there is none.

    It is renamed first: a kill in the middle leaves a leftover, not a part of a checkpoint.
    """
    folder = checkpoint_folder(run_folder, version)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        files.fsync_folder(folder.parent)
        shutil.rmtree(aside)


def remove_leftovers(run_folder: Path) -> None:
    """Deletes what killed processes left of saves and deletions; living processes' are left alone."""
    folder = checkpoints_folder(run_folder)
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _LEFTOVER.fullmatch(path.name)
        if match and not (match["pid"] and may_be_writing(int(match["pid"]), path)):
            shutil.rmtree(path, ignore_errors=True)
