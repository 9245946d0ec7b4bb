"""The device seam: the one place that asks what device a run is on.

It chooses engine, learner spec and transport; every other module is told. Imports without torch,
so that `fp8rl validate` and `fp8rl explain` answer at once.
"""

import os
from dataclasses import dataclass
from importlib.util import find_spec

from fp8rl.recipe.rules import CUDA_NOT_BUILT, RecipeError
from fp8rl.recipe.schema import Device, Linear, Recipe


@dataclass(frozen=True)
class Backends:
    """What runs each part of a run, in words a report can show."""

    device: Device
    threads: int
    devices: int
    engine: str
    rollout_linears: str
    kv_cache: str
    learner: str
    learner_linears: str
    transport: str


def resolve(recipe: Recipe) -> Backends:
    """The backends of `recipe` on this machine.

    `device: auto` means the CPU as long as the CUDA side is not built, so it never depends on the
    machine. Raises RecipeError for `device: cuda`, and where the CPU engine is not installed.
    """
    if recipe.device is Device.CUDA:
        raise RecipeError(f"device: {CUDA_NOT_BUILT}")
    if find_spec("vllm") is None:
        raise RecipeError("device: cpu needs vLLM's CPU build: install fp8rl with the extra `cpu`")
    precision = recipe.precision
    return Backends(
        device=Device.CPU,
        threads=recipe.threads or len(os.sched_getaffinity(0)),
        devices=1,
        engine="vLLM, CPU build, in process",
        rollout_linears=(
            "block-wise W8A8 FP8: fp8rl's vLLM method, FP8 codes, FP32 products (emulated)"
            if precision.rollout is Linear.FP8
            else "BF16, vLLM's own kernels"
        ),
        kv_cache=(
            "FP8 E4M3, vLLM's own CPU kernels"
            if precision.kv_cache is Linear.FP8
            else "BF16, vLLM's own CPU kernels"
        ),
        learner="Megatron-core GPTModel, FP32 master weights, BF16 activations",
        learner_linears=(
            "block-wise FP8 forward, dgrad and wgrad: fp8rl reference, FP32 products (emulated)"
            if precision.learner is Linear.FP8
            else "BF16, torch"
        ),
        transport="safetensors files, checked by digest",
    )


def compute_environment(recipe: Recipe) -> dict[str, str]:
    """Environment of engine and learner processes.

    Thread counts change the order of sums and so the bits of results, and Ray would set one thread
    for actors that reserve no CPU. MKL is told to give the same bits in every run.
    """
    threads = str(resolve(recipe).threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "MKL_CBWR": "AUTO",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
