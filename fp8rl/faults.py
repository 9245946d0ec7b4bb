"""Planted faults, for tests of what happens when something breaks: nothing without FP8RL_FAULTS.

FP8RL_FAULTS is a JSON list of {"at": name of a point, "do": what, "once": path of a marker file}.
A fault fires where the code reaches a point of that name (shell patterns are allowed) and the marker
file is not there yet; it makes the marker first, so it fires once, also across processes.

do: "kill" ends this process with SIGKILL; "raise" raises FaultError; "disk_full" raises ENOSPC;
"memory" raises MemoryError; "hang" sleeps for an hour. "times <number>" breaks nothing: it is what
`factor` gives back, for a value that comes out wrong.
"""

import errno
import fnmatch
import json
import os
import signal
import time
from pathlib import Path

VARIABLE = "FP8RL_FAULTS"
_TIMES = "times "


class FaultError(RuntimeError):
    """A planted fault."""


def point(name: str) -> None:
    """Marks a place where a test can have this process break."""
    planted = os.environ.get(VARIABLE)
    if planted:
        _reach(name, planted)


def factor(name: str) -> float:
    """What a test has multiplied into the value `name`; 1 without one."""
    planted = os.environ.get(VARIABLE)
    for fault in json.loads(planted) if planted else ():
        is_one = fault["do"].startswith(_TIMES) and fnmatch.fnmatchcase(name, fault["at"])
        if is_one and _first_time(Path(fault["once"]), name):
            return float(fault["do"].removeprefix(_TIMES))
    return 1.0


def _reach(name: str, planted: str) -> None:
    for fault in json.loads(planted):
        if fnmatch.fnmatchcase(name, fault["at"]) and _first_time(Path(fault["once"]), name):
            _break(name, fault["do"])


def _first_time(marker: Path, name: str) -> bool:
    try:
        with marker.open("x") as file:
            file.write(f"{name} {os.getpid()}")
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    return True


def _break(name: str, what: str) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "raise":
        raise FaultError(f"planted fault at {name}")
    elif what == "disk_full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    elif what == "memory":
        raise MemoryError(f"planted fault at {name}")
    elif what == "hang":
        time.sleep(3600)
    else:
        raise ValueError(f"{VARIABLE}: unknown fault {what!r} at {name}")
