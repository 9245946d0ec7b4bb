"""The `fp8rl` command, as a benchmark calls it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from fp8rl import faults


def call(log: Path, *arguments: str, planted: list[dict[str, str]] | None = None) -> int:
    """Runs `fp8rl` with `arguments`; its exit code. Its output goes into a file: a killed command
    leaves a server that would hold a pipe. planted: see fp8rl/faults.py."""
    command = [str(Path(sys.executable).parent / "fp8rl"), *arguments]
    environment = os.environ | ({faults.VARIABLE: json.dumps(planted)} if planted else {})
    with log.open("ab") as output:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        ).returncode


def fp8rl(log: Path, *arguments: str) -> None:
    """As `call`; raises RuntimeError with the end of the log where the command fails."""
    if call(log, *arguments):
        raise RuntimeError(f"fp8rl {' '.join(arguments)} failed:\n{log.read_text()[-3000:]}")
