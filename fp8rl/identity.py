"""run.json: what a run is. Kept twice, each with its own digest, since nothing can be done without it.

{"digest": ..., "id": ..., "name": ..., "origin": ..., "recipe": {...}, "recipe_digest": ..., ...}
"""

from pathlib import Path
from typing import Any

from fp8rl.files import from_sealed, to_sealed, write_atomic

IDENTITY = "run.json"
COPY = ".run.json.copy"
_NEEDED = ("id", "name", "origin", "recipe")


class IdentityError(RuntimeError):
    """run.json and its copy are both missing or damaged, or of two runs."""


def write_identity(folder: Path, values: dict[str, Any]) -> None:
    """Writes `values` as the identity of the run in `folder`, copy first."""
    for name in (COPY, IDENTITY):
        write_atomic(folder / name, to_sealed(values))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        values = from_sealed(path.read_bytes())
    except (OSError, ValueError):
        return None
    return values if all(key in values for key in _NEEDED) else None


def is_whole(path: Path) -> bool:
    """Whether `path`, run.json or its copy, is as it was written."""
    return _read(path) is not None


def read_identity(folder: Path) -> dict[str, Any]:
    """The identity of the run in `folder`, from the copy where run.json is damaged.

    Raises IdentityError where both are, and where they are of two runs.
    """
    path = folder / IDENTITY
    values, copy = _read(path), _read(folder / COPY)
    if values is not None and copy is not None and values["id"] != copy["id"]:
        raise IdentityError(
            f"{path} is of run {values['name']!r} (id {values['id']}), its copy {folder / COPY} of run "
            f"{copy['name']!r} (id {copy['id']}). Delete the one that does not belong here (`rm`), "
            "then resume; it is written again from the other"
        )
    found = values or copy
    if found is None:
        raise IdentityError(
            f"{path} and its copy {folder / COPY} are missing or damaged: the run cannot be resumed. "
            "Its rollouts, rewards and checkpoints are readable files; put one of the two back from a "
            f"backup (`cp BACKUP {path}`) if you have one"
        )
    return found


def restore_identity(folder: Path) -> str | None:
    """Writes run.json and its copy again where one is not whole, or is older; says so. None where
    there was no need.
    """
    values, copy = _read(folder / IDENTITY), _read(folder / COPY)
    if values is not None and values == copy:
        return None
    write_identity(folder, read_identity(folder))
    if values is None or copy is None:
        damaged, whole = (COPY, IDENTITY) if copy is None else (IDENTITY, COPY)
        return f"{folder / damaged} was missing or damaged; written again from {whole}"
    # Killed between the two writes of a change: the one that was asked for may be asked for again.
    return f"{folder / COPY} was not that of {IDENTITY}; written again from it"
