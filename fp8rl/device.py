"""The device seam: the one place that decides by device what a run is built of.

`resolve` names the classes of engine and policy model and the transport; the actors build what it
names. Another device is another row here. (Inside, vllm_plugin.py packs weights for the CPU's
kernels, and numerics/compiled.py is a faster way to the same bits for CPU tensors.)

Imports without torch, so that `fp8rl validate` and `fp8rl explain` answer at once.
"""

import os
import shutil
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from fp8rl.machine import AMX_FLAGS, cpu_flags
from fp8rl.recipe.data import with_absolute_paths
from fp8rl.recipe.precision import Fp8Backend, Linear, Precision
from fp8rl.recipe.rules import CUDA_NOT_BUILT, RecipeError
from fp8rl.recipe.schema import Device, Recipe


@dataclass(frozen=True)
class Backends:
    """What a run is built of. engine, policy_model, transport: "module:name"; the rest is for people.

    devices: how many tokens/s/GPU divides by. threads: of engine and learner, each. fp8_backend: what
    computes the products of FP8 linears (numerics/backends).
    """

    device: Device
    devices: int
    threads: int
    engine: str
    policy_model: str
    transport: str
    rollout_linears: str
    kv_cache: str
    learner_linears: str
    learner_rounding: str
    fp8_backend: str

    def load(self, part: str) -> Any:
        """The class or module that `part` ("engine", "policy_model", "transport") names."""
        module, _, name = getattr(self, part).partition(":")
        loaded = import_module(module)
        return getattr(loaded, name) if name else loaded


def resolve(recipe: Recipe) -> Backends:
    """The backends of `recipe` on this machine.

    `device: auto` means the CPU as long as the CUDA side is not built, so it never depends on the
    machine. Raises RecipeError for `device: cuda`, where the CPU engine is not installed, and for an
    FP8 KV cache on a CPU without AVX-512.
    """
    if recipe.device is Device.CUDA:
        raise RecipeError(f"device: {CUDA_NOT_BUILT}")
    if find_spec("vllm") is None:
        raise RecipeError("device: cpu needs vLLM's CPU build: install fp8rl with the extra `cpu`")
    precision = recipe.precision
    fp8_kv = precision.kv_cache is Linear.FP8
    if fp8_kv and "avx512f" not in cpu_flags():
        raise RecipeError(
            "precision.kv_cache: vLLM's FP8 KV cache on a CPU needs AVX-512, which this one does not "
            "have. Set precision.kv_cache=bf16"
        )
    fp8_backend = _cpu_fp8_backend(precision)
    return Backends(
        device=Device.CPU,
        devices=1,
        threads=recipe.threads or len(os.sched_getaffinity(0)),
        engine="fp8rl.rollout.engine:Engine",
        policy_model="fp8rl.model.megatron:PolicyModel",
        transport="fp8rl.sync.transport:HostMemory",
        rollout_linears=(
            f"W8A8 FP8 ({precision.scaling} scaling) inside vLLM; {_PRODUCTS[fp8_backend]}"
            if precision.rollout is Linear.FP8
            else "BF16, vLLM's own kernels"
        ),
        kv_cache="FP8 E4M3, vLLM's own kernels" if fp8_kv else "BF16, vLLM's own kernels",
        learner_linears=(
            f"FP8 ({precision.scaling} scaling, {precision.learner_format}) forward, dgrad and wgrad; "
            f"{_PRODUCTS[fp8_backend]}"
            if precision.learner is Linear.FP8
            else "BF16, torch"
        ),
        learner_rounding=(
            "as vLLM's CPU kernels; attention by vLLM's own"
            + (", of K and V as the FP8 cache holds them" * (precision.learner_kv is Linear.FP8))
            if precision.parity
            else "as Megatron-core and torch"
        ),
        fp8_backend=fp8_backend,
    )


_PRODUCTS = {
    "reference": "products emulated in FP32",
    "amx": "exact products of FP8 values in AMX tiles, FP32 sums",
}


def _cpu_fp8_backend(precision: Precision) -> str:
    """The backend of FP8 products on this CPU: the recipe's word, or the fastest where it says auto."""
    if precision.backend in (Fp8Backend.TORCH, Fp8Backend.TRANSFORMER_ENGINE):
        raise RecipeError(f"precision.backend: {precision.backend} runs on a GPU; device is cpu")
    if precision.backend is Fp8Backend.REFERENCE:
        return "reference"
    missing = sorted(set(AMX_FLAGS) - cpu_flags())
    reason = f"this CPU has no {', '.join(missing)}" if missing else None
    if reason is None and shutil.which("g++") is None:
        reason = "there is no C++ compiler (g++) to compile its kernel with"
    if reason is None:
        return "amx"
    if precision.backend is Fp8Backend.AMX:
        raise RecipeError(
            f"precision.backend: amx cannot run: {reason}. Set precision.backend=reference"
        )
    return "reference"


def settled(recipe: Recipe) -> Recipe:
    """`recipe` with what is left to the machine answered: the backend of FP8 products and the number
    of threads, since the bits depend on both; and the paths of data made whole. Every process of a run
    uses the same, also where it is resumed on another machine.
    """
    backends = resolve(recipe)
    precision = recipe.precision.model_copy(update={"backend": Fp8Backend(backends.fp8_backend)})
    task = with_absolute_paths(recipe.task)
    return recipe.model_copy(update={"precision": precision, "threads": backends.threads, "task": task})


def compute_environment(recipe: Recipe) -> dict[str, str]:
    """Environment of engine and learner processes.

    Thread counts change the order of sums and so the bits of results, and Ray would set one thread
    for actors that reserve no CPU. MKL is told to give the same bits in every run. Idle threads sleep:
    engine and learner share the cores, and spinning ones made two runs at once ten times slower each.
    """
    threads = str(resolve(recipe).threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "MKL_CBWR": "AUTO",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
