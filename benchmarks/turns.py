"""Rollout speed of several arms in turns: each has its engine, and one generates after the other.

Arms that are measured minutes apart meet another machine where it is shared; ratios of turns that
follow each other do not.
"""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from fp8rl.device import compute_environment
from fp8rl.recipe.load import load_recipe


def _say(process: "subprocess.Popen[str]", wanted: str) -> str:
    """The rest of the first line that begins with `wanted`."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(wanted):
            return line.removeprefix(wanted).strip()
    raise RuntimeError(f"{process.args}: ended before it said {wanted!r}")


def rollout_in_turns(folder: Path, arms: tuple[str, ...], rounds: int = 6) -> dict[str, list[float]]:
    """tokens/s of each of `arms` in `folder` by round; a first round warms up and is left out."""
    with ExitStack() as at_the_end:
        processes = {}
        for arm in arms:
            path = str(folder / f"{arm}.yaml")
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.measure", path, "--turns"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | compute_environment(load_recipe(path).recipe),
            )
            at_the_end.callback(process.wait)
            at_the_end.callback(process.terminate)
            _say(process, "ready")
            processes[arm] = process
        speeds: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(rounds + 1):
            for arm, process in processes.items():
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
                speeds[arm].append(float(_say(process, "turn")))
    return {arm: values[1:] for arm, values in speeds.items()}


def over_first(speeds: dict[str, list[float]]) -> dict[str, float]:
    """Each arm over the first one: the median of the rounds' ratios."""
    first = next(iter(speeds.values()))
    return {
        arm: median(value / base for value, base in zip(values, first, strict=True))
        for arm, values in speeds.items()
    }
