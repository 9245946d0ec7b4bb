"""The `fp8rl` command, each time in a process of its own that is forked from one with warm imports.

A process start costs seconds of imports, and the kill matrix has dozens of them. Reads one JSON line
for each command: {"arguments": [...], "environment": {...}, "log": path}; answers with two lines, the
process id and, at its end, the exit code (-9 where it was killed).
"""

import json
import os
import sys


def _become(request: dict) -> None:
    """In the child: the command, with its output in a file."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["environment"])
    sys.argv = ["fp8rl", *request["arguments"]]
    from flows.cli import main

    main()
    sys.exit(0)


def main() -> None:
    from flows.environment import set_environment

    set_environment(os.getcwd())  # before Prefect is imported, which reads its settings then
    import mlflow.tracking  # noqa: F401
    import ray  # noqa: F401

    import flows.cli
    import flows.cli_runs
    import flows.training  # noqa: F401

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _become(json.loads(line))
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
