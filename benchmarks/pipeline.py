"""`make bench`: every arm of the tiny recipe, side by side, as benchmarks/results/tiny.json."""

import json
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import record
from fp8rl.device import compute_environment
from fp8rl.recipe.load import load_recipe

CONFIGS = Path(__file__).parent.parent / "configs"
ARMS = ("bf16", "bf16-kv", "fp8-rollout", "fp8-rollout-kv", "fp8-e2e", "fp8-e2e-kv")


def measure_arms(folder: Path, *overrides: str) -> dict[str, dict[str, float]]:
    """The timings of each arm in `folder`, each in a process of its own."""
    results = {}
    for arm in track(ARMS, description=f"{folder.name}: arms"):
        command = [sys.executable, "-m", "benchmarks.measure", str(folder / f"{arm}.yaml"), *overrides]
        environment = os.environ | compute_environment(load_recipe(folder / f"{arm}.yaml").recipe)
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            raise RuntimeError(f"{arm}: {done.stderr[-4000:]}")
        results[arm] = json.loads(done.stdout.splitlines()[-1])
    return results


def ratios(arms: dict[str, dict[str, float]]) -> dict[str, float]:
    """What is compared: an arm over BF16, in one run. Rollout: tokens/s. Learner: time."""

    def over_bf16(arm: str, key: str) -> float:
        return arms[arm][key] / arms["bf16"][key]

    return {
        "rollout_fp8_over_bf16": over_bf16("fp8-rollout", "rollout_tokens_per_sec"),
        "rollout_kv_over_bf16": over_bf16("bf16-kv", "rollout_tokens_per_sec"),
        "rollout_fp8_kv_over_bf16": over_bf16("fp8-rollout-kv", "rollout_tokens_per_sec"),
        "learner_step_fp8_over_bf16": over_bf16("fp8-e2e", "learner_step_s"),
        "requantize_s": arms["fp8-e2e"]["requantize_s"],
    }


def main() -> None:
    """Measures, prints and writes."""
    arms = measure_arms(CONFIGS / "tiny")
    values = ratios(arms)
    table = Table(title="Arms of the tiny recipe (FP8 linears emulated on the CPU)")
    keys = sorted({key for arm in arms.values() for key in arm})
    for heading in ("arm", *keys):
        table.add_column(heading, justify="right")
    for arm, result in arms.items():
        table.add_row(arm, *(f"{result[k]:.4g}" if k in result else "" for k in keys))
    console = Console()
    console.print(table)
    for name, value in values.items():
        console.print(f"{name}: {value:.3f}")
    console.print(record.write("tiny", {**values, "arms": arms}))


if __name__ == "__main__":
    main()
