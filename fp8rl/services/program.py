"""A server's program, started once what an earlier start of it left behind is gone.

    python -m fp8rl.services.program COMMAND...

A server that is killed leaves its own processes behind (MLflow's web server, Ray's), on the port that
the next one is to have.
"""

import os
import sys

import psutil

# In the environment of everything that an `up` starts, and of nothing else.
MARKER = "FP8RL_UP"
# In that of a server and of what it has started: which one it is.
SERVICE = "FP8RL_SERVICE"


def alone(command: list[str]) -> list[str]:
    """The command that starts `command` in the place of what is left; SERVICE must be set for it."""
    return [sys.executable, "-m", "fp8rl.services.program", *command]


def end_leftovers() -> None:
    """Kills what is left of this service in this `up`."""
    own = {name: os.environ[name] for name in (MARKER, SERVICE)}
    left = [p for p in psutil.process_iter() if p.pid != os.getpid() and own.items() <= _of(p).items()]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=10)


def _of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


if __name__ == "__main__":
    end_leftovers()
    os.execvp(sys.argv[1], sys.argv[1:])
