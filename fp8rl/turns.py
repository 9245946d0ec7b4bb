"""Training runs of one machine take turns, where its `fp8rl up` says so: two would halve each other's
devices, or not fit into them.

FP8RL_DEVICE_LOCK names a file; whoever holds its lock has the devices. The lock ends with its process,
however that ends. Unset: runs are not kept from each other.
"""

import fcntl
import os
from pathlib import Path

VARIABLE = "FP8RL_DEVICE_LOCK"


class Turn:
    """A run's turn at the devices; `run` is the name that others are told."""

    def __init__(self, run: str) -> None:
        path = os.environ.get(VARIABLE)
        self._run, self._path = run, Path(path) if path else None
        self._file = None if self._path is None else self._path.open("a")

    def is_mine(self) -> bool:
        """Whether the devices are this run's now; takes them where they are free."""
        if self._file is None or self._path is None:
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._path.write_text(f"run {self._run} (process {os.getpid()})")
        return True

    def holder(self) -> str:
        """Who has them, in words."""
        return "" if self._path is None else self._path.read_text() or "another run"

    def give_up(self) -> None:
        """Lets the next one have them."""
        if self._file is not None:
            self._file.close()
