"""Several processes in turns: each has its engine, and one generates after the other.

Arms that are measured minutes apart meet another machine where it is shared; ratios of turns that
follow each other do not.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from fp8rl.device import compute_environment
from fp8rl.recipe.load import load_recipe
from fp8rl.recipe.schema import Recipe


def _say(process: "subprocess.Popen[str]", wanted: str) -> str:
    """The rest of the first line that begins with `wanted`."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(wanted):
            return line.removeprefix(wanted).strip()
    raise RuntimeError(f"{process.args}: ended before it said {wanted!r}")


def in_turns(arms: dict[str, tuple[Sequence[str], Recipe]], rounds: int) -> dict[str, list[str]]:
    """What each of `arms` says in each round.

    arms: a Python module with its arguments, and the recipe whose environment its process gets. It says
    "ready", and then, for each line that comes in, "turn" and what it measured.
    """
    with ExitStack() as at_the_end:
        processes = {}
        for arm, (arguments, recipe) in arms.items():
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | compute_environment(recipe),
            )
            at_the_end.callback(process.wait)
            at_the_end.callback(process.terminate)
            _say(process, "ready")
            processes[arm] = process
        said: dict[str, list[str]] = {arm: [] for arm in arms}
        for _ in range(rounds):
            for arm, process in processes.items():
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
                said[arm].append(_say(process, "turn"))
    return said


def rollout_in_turns(folder: Path, arms: tuple[str, ...], rounds: int = 6) -> dict[str, list[float]]:
    """tokens/s of each of `arms` in `folder` by round; a first round warms up and is left out."""
    paths = {arm: str(folder / f"{arm}.yaml") for arm in arms}
    said = in_turns(
        {
            arm: (["benchmarks.measure", path, "--turns"], load_recipe(path).recipe)
            for arm, path in paths.items()
        },
        rounds + 1,
    )
    return {arm: [float(value) for value in values[1:]] for arm, values in said.items()}


def over_first(speeds: dict[str, list[float]]) -> dict[str, float]:
    """Each arm over the first one: the median of the rounds' ratios."""
    first = next(iter(speeds.values()))
    return {
        arm: median(value / base for value, base in zip(values, first, strict=True))
        for arm, values in speeds.items()
    }
