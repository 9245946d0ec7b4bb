"""`make bench`: the arms on SmolLM2-135M and the quantiser, as results/numerics.json.

On a CPU the FP8 linears are emulated: the times say what that costs here, and nothing about FP8 speed
on a GPU.
"""

import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any

import torch

from benchmarks import record
from benchmarks.mismatch import SMOLLM2
from benchmarks.pipeline import measure_arms, print_arms, ratios
from benchmarks.turns import over_first, rollout_in_turns
from fp8rl.device import compute_environment, resolve
from fp8rl.numerics.formats import Scaling, activation_scheme
from fp8rl.numerics.quantise import quantise
from fp8rl.recipe.load import load_recipe

_ELEMENTS = 1 << 25


def gigabytes_per_second(work: Any, size: int) -> float:
    """Bytes read and written by `work`, over its median time."""
    times = []
    for _ in range(8):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return size / median(times[1:]) / 1e9


def quantizer() -> dict[str, float]:
    """The quantiser (BF16 in 1x128 groups to codes and descales) beside a copy of the same tensor."""
    x = torch.randn(_ELEMENTS // 4096, 4096).bfloat16()
    scheme = activation_scheme(Scaling.BLOCK)
    target = torch.empty_like(x)
    quantised_bytes = 2 + 1 + 4 / 128  # BF16 in, a code and a share of a descale out
    return {
        "quantizer_gbps": gigabytes_per_second(
            lambda: quantise(x, scheme), int(x.numel() * quantised_bytes)
        ),
        "memcpy_gbps": gigabytes_per_second(lambda: target.copy_(x), x.numel() * 4),
    }


def quantizer_elsewhere() -> dict[str, float]:
    """`quantizer` in a process with the environment of a learner: thread counts are read at start."""
    environment = os.environ | compute_environment(load_recipe(SMOLLM2 / "bf16.yaml").recipe)
    code = "import json; from benchmarks.numerics import quantizer; print(json.dumps(quantizer()))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    values: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return values


def main() -> None:
    """Measures, prints and writes."""
    speeds = quantizer_elsewhere()
    turns = rollout_in_turns(SMOLLM2, ("bf16", "fp8-rollout", "fp8-rollout-kv"))
    rollout = over_first(turns)
    arms = measure_arms(SMOLLM2)
    found = ratios(arms)
    values = {
        "rollout_fp8_kv_over_bf16": rollout["fp8-rollout-kv"],
        "rollout_fp8_over_bf16": rollout["fp8-rollout"],
        "learner_step_fp8_over_bf16": found["learner_step_fp8_over_bf16"],
        "requantize_s": found["requantize_s"],
        **speeds,
    }
    print_arms("Arms on SmolLM2-135M (FP8 linears emulated on the CPU)", arms, values)
    recipe = load_recipe(SMOLLM2 / "fp8-e2e-kv.yaml").recipe
    about = {"fp8_backend": resolve(recipe).fp8_backend, "model": "SmolLM2-135M-Instruct"}
    print(record.write("numerics", {**values, **about, "rollout_turns": turns, "arms": arms}))


if __name__ == "__main__":
    main()
