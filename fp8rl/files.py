"""Files and folders that appear whole or not at all, also after a kill or a full disk."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp8rl import faults


class DiskFullError(OSError):
    """There was no room for a file; what was there before is intact."""


def sha256(content: bytes) -> str:
    """Hexadecimal sha256 of `content`."""
    return hashlib.sha256(content).hexdigest()


def file_sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def values_digest(values: dict[str, Any]) -> str:
    """sha256 of the canonical JSON of `values`."""
    return sha256(json.dumps(values, sort_keys=True).encode())


def to_sealed(values: dict[str, Any]) -> bytes:
    """JSON of `values` with their digest, by which damage shows."""
    return json.dumps({"digest": values_digest(values), **values}, indent=1).encode()


def from_sealed(content: bytes) -> dict[str, Any]:
    """What `to_sealed` was given; raises ValueError where a value is another."""
    values = json.loads(content)
    if not isinstance(values, dict) or values.pop("digest", None) != values_digest(values):
        raise ValueError("damaged: it does not match its own digest")
    return values


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A path to write to, which then takes the place of `path`; removed where that fails.

    Raises DiskFullError where there was no room; what was there before is intact then.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        faults.point(f"write:{path.name}")
        yield temporary
        fsync_file(temporary)
        temporary.replace(path)
        fsync_folder(path.parent)
    except Exception as error:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            temporary.unlink(missing_ok=True)
        told = disk_error(error, path)
        if told is error:
            raise
        raise told from error


def write_atomic(path: Path, content: bytes) -> None:
    """Writes `path` so that it holds either its old content or all of `content`, also after a crash.

    Raises DiskFullError naming the file where there is no room; its old content is intact then.
    """
    with beside(path) as temporary:
        temporary.write_bytes(content)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def disk_error(error: Exception, path: Path) -> Exception:
    """`error` in words a user can act on, where it says that there is no room; else itself.

    Libraries that write by themselves (safetensors) tell the cause only in their text.
    """
    number = getattr(error, "errno", None)
    told = next(
        (n for n in _NO_ROOM if os.strerror(n) in str(error) or f"os error {n}" in str(error)), None
    )
    if number in _NO_ROOM or told is not None:
        return DiskFullError(
            number or told,
            f"no room to write {path}. What was committed before is intact: free some space "
            "(`fp8rl clean` shows what can go), then `fp8rl resume` the run",
        )
    return error


def copy_atomic(source: Path, target: Path) -> None:
    """Copies a file so that `target` holds either its old content or all of the new.

    Raises DiskFullError as `write_atomic`.
    """
    with beside(target) as temporary:
        shutil.copyfile(source, temporary)


def fsync_file(path: Path) -> None:
    """Has the content of a written file reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(folder: Path) -> None:
    """Has the names in `folder` reach the disk."""
    fsync_file(folder)


def fsync_tree(folder: Path) -> None:
    """Has all files and names below `folder` reach the disk."""
    for path in sorted(folder.rglob("*")):
        fsync_file(path)
    fsync_folder(folder)


def put_in_place(building: Path, folder: Path) -> None:
    """Renames the whole folder `building` to `folder`; one that stands there is replaced.

    Its files are synced first, so that after a crash `folder` is the old one, none, or all of the new.
    """
    fsync_tree(building)
    old = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    building.rename(folder)
    fsync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
