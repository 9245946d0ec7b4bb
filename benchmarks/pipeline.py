"""`make bench`: every arm of the tiny recipe, side by side, as benchmarks/results/tiny.json."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import record
from fp8rl.device import compute_environment
from fp8rl.recipe.load import load_recipe

CONFIGS = Path(__file__).parent.parent / "configs"
ARMS = ("bf16", "bf16-kv", "fp8-rollout", "fp8-rollout-kv", "fp8-e2e", "fp8-e2e-kv")


def measure_arms(
    folder: Path, *arguments: str, arms: Sequence[str] = ARMS, label: str = ""
) -> dict[str, dict[str, Any]]:
    """What benchmarks.measure says of each of `arms` in `folder`, each in a process of its own."""
    results = {}
    for arm in track(arms, description=f"{folder.name} {label}"):
        command = [sys.executable, "-m", "benchmarks.measure", str(folder / f"{arm}.yaml"), *arguments]
        environment = os.environ | compute_environment(load_recipe(folder / f"{arm}.yaml").recipe)
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            raise RuntimeError(f"{arm}: {done.stderr[-4000:]}")
        results[arm] = json.loads(done.stdout.splitlines()[-1])
    return results


def ratios(arms: dict[str, dict[str, Any]]) -> dict[str, float]:
    """What is compared: an arm over BF16, in one run. Rollout: tokens/s. Learner: time."""

    def over_bf16(arm: str, key: str) -> float:
        return float(arms[arm][key] / arms["bf16"][key])

    return {
        "rollout_fp8_over_bf16": over_bf16("fp8-rollout", "rollout_tokens_per_sec"),
        "rollout_kv_over_bf16": over_bf16("bf16-kv", "rollout_tokens_per_sec"),
        "rollout_fp8_kv_over_bf16": over_bf16("fp8-rollout-kv", "rollout_tokens_per_sec"),
        "learner_step_fp8_over_bf16": over_bf16("fp8-e2e", "learner_step_s"),
        "requantize_s": arms["fp8-e2e"]["requantize_s"],
    }


def print_arms(title: str, arms: dict[str, dict[str, Any]], values: dict[str, float]) -> None:
    """A table of the arms, and the ratios below it."""
    table = Table(title=title)
    keys = sorted({key for arm in arms.values() for key in arm} - {"mismatch"})
    for heading in ("arm", *keys, "token_mult_prob_error"):
        table.add_column(heading, justify="right")
    for arm, result in arms.items():
        cells = [f"{result[k]:.4g}" if k in result else "" for k in keys]
        table.add_row(arm, *cells, f"{result['mismatch']['token_mult_prob_error']:.4f}")
    console = Console()
    console.print(table)
    for name, value in values.items():
        console.print(f"{name}: {value:.3f}")


def main() -> None:
    """Measures, prints and writes."""
    arms = measure_arms(CONFIGS / "tiny")
    values = ratios(arms)
    print_arms("Arms of the tiny recipe (FP8 linears emulated on the CPU)", arms, values)
    print(record.write("tiny", {**values, "arms": arms}))


if __name__ == "__main__":
    main()
