"""One writer per run: a lock in the run folder, with an owner and an expiry.

    runs/<run>/lock.json    who writes: host, process, when it started; `beat` is renewed as it lives

On the owner's own host the lock ends with its process, whatever its age. Seen from another host it
ends when `beat` is older than `expires_s`. An owner that lost its lock finds out at its next commit.
"""

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fp8rl.files import write_atomic

EXPIRES_S = 120.0


class LockedError(RuntimeError):
    """Another process writes to the run, or has taken it over."""


@dataclass(frozen=True)
class Owner:
    """A process that writes to a run. pid_started: as `process_start`. beat: Unix seconds."""

    host: str
    pid: int
    pid_started: float
    beat: float
    expires_s: float

    @staticmethod
    def this_process(expires_s: float = EXPIRES_S) -> "Owner":
        pid = os.getpid()
        started = process_start(pid)
        assert started is not None
        return Owner(socket.gethostname(), pid, started, time.time(), expires_s)

    def is_same(self, other: "Owner") -> bool:
        one, two = (self.host, self.pid, self.pid_started), (other.host, other.pid, other.pid_started)
        return one == two

    def is_alive(self) -> bool:
        """Whether it may still write."""
        if self.host == socket.gethostname():
            return is_alive(self.pid, self.pid_started)
        return time.time() - self.beat < self.expires_s

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def process_start(pid: int) -> float | None:
    """When process `pid` started; None where there is none. Tells a reused number.

    Seconds since the machine's start, in hundredths: no setting of the clock changes it.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return round(float(process.create_time()) - float(psutil.boot_time()), 2)
    except psutil.NoSuchProcess:
        return None


def is_alive(pid: int, started: float) -> bool:
    """Whether the process `pid` that started then is still there."""
    return process_start(pid) == started


def may_be_writing(pid: int, path: Path) -> bool:
    """Whether the process of number `pid` that made `path` may still run. Containers soon use a number
    again: one that began after the last change of `path` is another.
    """
    import psutil

    try:
        # A minute: the two clocks need not agree.
        return bool(psutil.Process(pid).create_time() < path.stat().st_mtime + 60)
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False


def read_owner(folder: Path) -> Owner | None:
    """Who holds the lock of the run in `folder`, alive or not; None where nobody does."""
    try:
        return Owner(**json.loads((folder / "lock.json").read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return None  # not a lock that anybody wrote whole; the next owner writes over it


def require_held(folder: Path) -> None:
    """Raises LockedError unless this process holds the lock of the run in `folder`."""
    owner = read_owner(folder)
    if owner is None or not owner.is_same(Owner.this_process()):
        raise LockedError(
            f"{folder}: this process does not hold the run's lock; "
            f"{'nobody does' if owner is None else f'{owner} does'}. Nothing was written"
        )


@contextmanager
def _guard(folder: Path) -> Iterator[None]:
    """Keeps two processes from taking the same stale lock at once."""
    with (folder / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _require_free(folder: Path) -> None:
    owner = read_owner(folder)
    if owner is not None and owner.is_alive():
        raise LockedError(
            f"run {folder.name!r} is being written by {owner}. Stop that first "
            "(Ctrl-C there, or Cancel in the Prefect UI), then try again"
        )


@contextmanager
def kept_free(folder: Path) -> Iterator[None]:
    """Keeps every process from taking the lock of the run in `folder` while it lasts.

    Writes nothing, so it works on a full disk. Raises LockedError where a living process has the lock.
    """
    with _guard(folder):
        _require_free(folder)
        yield


class RunLock:
    """Held from `RunLock(folder)` to `release()`; renewed by a thread of its own.

    Raises LockedError naming the owner where a living one has it.
    """

    def __init__(self, folder: Path, expires_s: float = EXPIRES_S) -> None:
        self.folder = folder
        self._owner = Owner.this_process(expires_s)
        with kept_free(folder):
            self._write()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="run-lock", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        self._owner = replace(self._owner, beat=time.time())
        write_atomic(self.folder / "lock.json", json.dumps(asdict(self._owner)).encode())

    def _renew(self) -> None:
        while not self._released.wait(self._owner.expires_s / 4):
            try:
                with _guard(self.folder):
                    if self._released.is_set() or not self._is_mine():
                        return
                    self._write()
            except OSError:
                continue  # a full disk or a lost share shows itself at the next commit

    def _is_mine(self) -> bool:
        owner = read_owner(self.folder)
        return owner is not None and owner.is_same(self._owner)

    def release(self) -> None:
        """Gives the lock up; one that another process has taken is left to it."""
        self._released.set()
        with _guard(self.folder):
            if self._is_mine():
                (self.folder / "lock.json").unlink()
