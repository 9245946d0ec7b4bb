"""vLLM's own block-wise FP8 on CUDA: what a recipe means to it, and where it cannot follow.

NOT YET RUN ON A GPU: no CUDA build of vLLM was at hand, and the device seam refuses `device: cuda`.
Options, names and rules below are held against vLLM's own sources by
tests/contract/test_vllm_cuda.py; docs/vllm_adapter.md lists what each test holds.

The linears are vLLM's Fp8LinearMethod. It registers, per fused layer, `weight` (float8_e4m3fn [N, K])
and `weight_scale_inv` (FP32 descales, one for each 128x128 block of the fused matrix), and then hands
both to a kernel. Which kernel decides whether the published bytes are still there to be read back.

Imports without torch and without vLLM, so that a recipe can be checked anywhere.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8rl.model.dims import ModelDims
from fp8rl.model.names import name_table
from fp8rl.model.precision import Decision
from fp8rl.numerics.formats import BLOCK, Scaling
from fp8rl.recipe.precision import Linear, Precision, ScaleKind
from fp8rl.recipe.schema import Recipe
from fp8rl.rollout import options

METHOD = "fp8"
# vLLM's key for "block-wise FP8, activations too" where a kernel is asked for by quantisation scheme.
_SCHEME = "fp8_block_w8a8"

_REPACKS = "it packs the weight for its own layout, so what was published cannot be read back"
_WEIGHT_ONLY = "it leaves activations in BF16, which is not the FP8 that the recipe asks for"
# Every kernel that vLLM may choose for block-wise FP8 on CUDA, and why not where it may not be used.
KERNELS: dict[str, str | None] = {
    "CutlassFp8BlockScaledMMKernel": None,
    "TritonFp8BlockScaledMMKernel": None,
    "BlockWiseTorchFP8ScaledMMLinearKernel": None,
    "B12xFp8BlockScaledMMKernel": None,
    # On Hopper and with FP32 scales it keeps bytes and scales as they are; see `ENVIRONMENT`.
    "DeepGemmFp8BlockScaledMMKernel": None,
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel": (
        "it rounds the activations of small batches by a rule of FlashInfer's own"
    ),
    "MarlinFP8ScaledMMLinearKernel": f"{_WEIGHT_ONLY}, and {_REPACKS}",
    "HummingFP8ScaledMMLinearKernel": f"{_WEIGHT_ONLY}, and {_REPACKS}",
}
_BY_VALUE = (
    "it reads the scales as plain numbers once (and a CUDA graph keeps them), so scales of a later "
    "version would be sent and not used"
)
# Attention backends that may serve an FP8 KV cache, and why not where one may not.
ATTENTION: dict[str, str | None] = {
    "FLASH_ATTN": None,
    "TRITON_ATTN": None,
    "FLASHINFER": _BY_VALUE,
}
# UE8M0 rounds scales to powers of two when weights are loaded, and the weights anew with them.
ENVIRONMENT = options.ENVIRONMENT | {"VLLM_USE_DEEP_GEMM_E8M0": "0"}


def problems(precision: Precision) -> Iterator[tuple[str, str]]:
    """(recipe key, why) for all that vLLM's own FP8 linears cannot do of `precision`."""
    if precision.rollout is not Linear.FP8:
        return
    if precision.scaling is not Scaling.BLOCK:
        yield "precision.scaling", "vLLM's own FP8 linears are fed in 128x128 blocks only. Set block"
    if precision.rollout_scales.activations is not ScaleKind.FP32:
        yield (
            "precision.rollout_scales.activations",
            "the kernels that leave published bytes readable scale activations in FP32. Set fp32",
        )


def unequal_grids(dims: ModelDims, plan: Mapping[str, Decision]) -> list[str]:
    """FP8 tensors whose 128x128 blocks in vLLM are not those of the published tensor; each with why.

    vLLM lays one grid over a fused matrix, ours begins anew with each Hugging Face projection: the two
    are one where every part but the last has a whole number of blocks of rows. Its kernels also cut
    activations into groups of exactly 128.
    """
    found = []
    for slot in name_table(dims):
        if slot.columns is None or not plan[slot.hf[0]].format.is_fp8:
            continue
        for name, rows in list(zip(slot.hf, slot.rows, strict=True))[:-1]:
            if rows % BLOCK:
                found.append(
                    f"{name}: {rows} rows are no multiple of {BLOCK}, and {slot.vllm} goes on with "
                    "the next projection inside its last block"
                )
        if slot.columns % BLOCK:
            found += [f"{name}: {slot.columns} columns are no multiple of {BLOCK}" for name in slot.hf]
    return found


def quantization_config(plan: Mapping[str, Decision]) -> dict[str, Any] | None:
    """`quantization_config` of the model's config for `plan`; None where all of it is BF16.

    ignored_layers: Hugging Face modules that stay BF16. vLLM wants all parts of a fused layer there or
    none, which the precision plan guarantees.
    """
    linears = {name: d for name, d in plan.items() if name.endswith("_proj.weight")}
    if not any(d.format.is_fp8 for d in linears.values()):
        return None
    return {
        "quant_method": METHOD,
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "ignored_layers": [
            name.removesuffix(".weight") for name, d in linears.items() if not d.format.is_fp8
        ],
    }


def engine_options(
    recipe: Recipe, plan: Mapping[str, Decision], model_dir: Path, *, max_len: int
) -> dict[str, Any]:
    """As `options.engine_options`, with what CUDA adds."""
    quantization = quantization_config(plan)
    return options.engine_options(recipe, model_dir, max_len=max_len) | {
        "quantization": METHOD if quantization else None,
        "hf_overrides": {"quantization_config": quantization} if quantization else {},
        "kernel_config": {"linear_backend_per_quant": {_SCHEME: "cutlass"}},
        "attention_config": {"backend": "FLASH_ATTN"},
        "enable_sleep_mode": True,
    }
