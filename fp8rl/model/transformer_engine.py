"""FP8 training by Transformer Engine: what a recipe means to Megatron-core, and where it cannot.

NOT RUN YET: no GPU was at hand. The fields, names and rules below are held against Megatron-core's
own source by tests/contract/test_transformer_engine.py; nothing here has met a Transformer Engine.

Megatron-core builds TE's layers (`build`) and runs them under TE's own quantisation. The learner does
not ask for them yet: it has no CUDA side. TE quantises what it is given, the fused and interleaved
weights, and its grid of 128x128 blocks is that of our projections only where head and shard sizes are
multiples of 128. Without TE Megatron-core trains in FP32 with `fp8` set and says nothing; `require`
is the guard.

Imports without torch and without Megatron-core, so that a recipe can be checked anywhere.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from fp8rl.model.dims import ModelDims
from fp8rl.numerics.formats import BLOCK, BackendError, Scaling
from fp8rl.recipe.precision import Precision, ScaleKind

_RECIPES = {Scaling.BLOCK: "blockwise", Scaling.TENSOR: "tensorwise", Scaling.MXFP8: "mxfp8"}
# TE's layers hold the norm that comes before them.
_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def problems(precision: Precision) -> Iterator[tuple[str, str]]:
    """(recipe key, why) for all that TE's recipes cannot express."""
    scales = precision.learner_scales
    if precision.scaling not in _RECIPES:
        yield "precision.scaling", f"Transformer Engine has no {precision.scaling} scaling"
    if precision.scaling is Scaling.BLOCK and scales.weights is not scales.activations:
        yield (
            "precision.learner_scales",
            "Transformer Engine has one switch for the scales of weights and of activations; set both "
            "alike",
        )
    if precision.scaling is Scaling.TENSOR and ScaleKind.POW2 in (scales.weights, scales.activations):
        yield "precision.learner_scales", "Megatron-core's tensorwise recipe has FP32 scales only"
    if precision.include or precision.exclude:
        yield (
            "precision.include, precision.exclude",
            "Megatron-core quantises whole layers; use first_layers_bf16 and last_layers_bf16",
        )


def unequal_grids(dims: ModelDims, precision: Precision, *, tensor_parallel: int = 1) -> list[str]:
    """Where TE's blocks are not those of our projections; empty where parity holds.

    With one scale per tensor TE scales q, k, v (and gate, up) together. Otherwise a fused layer's
    rows must come in whole blocks: q, k and v of each KV group, and each rank's share.
    """
    found = []
    if precision.scaling is Scaling.TENSOR:
        return ["q, k, v and gate, up share one scale in Transformer Engine, and have their own here"]
    if precision.scaling is not Scaling.BLOCK:
        return []  # groups of 32 along the inputs do not know where a projection ends
    sizes = {
        "head_dim (k and v of a KV group)": dims.head_dim,
        "q rows of a KV group": dims.heads // dims.kv_heads * dims.head_dim,
        "attention output per rank": dims.q_rows // tensor_parallel,
        "intermediate size per rank": dims.intermediate // tensor_parallel,
        "hidden size": dims.hidden,
    }
    for what, size in sizes.items():
        if size % BLOCK:
            found.append(f"{what} is {size}, not a multiple of {BLOCK}")
    return found


def environment(precision: Precision) -> dict[str, str]:
    """What must stand in the learner's environment before TE is imported: it reads it once."""
    fp32 = precision.learner_scales.weights is ScaleKind.FP32
    return {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1" if fp32 else "0"}


def config_fields(precision: Precision) -> dict[str, Any]:
    """Fields of Megatron-core's TransformerConfig for FP8 training by `precision`."""
    fields: dict[str, Any] = {
        "fp8": precision.learner_format.value,
        "fp8_recipe": _RECIPES[precision.scaling],
        "fp8_param": False,  # FP32 masters; the published codes come from them
    }
    if precision.first_layers_bf16 or precision.last_layers_bf16:
        fields |= {
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": precision.first_layers_bf16,
            "num_layers_at_end_in_bf16": precision.last_layers_bf16,
        }
    return fields


def require() -> None:
    """Raises BackendError where Transformer Engine is not installed."""
    if find_spec("transformer_engine") is None:
        raise BackendError(
            "precision.backend=transformer_engine: Transformer Engine is not installed; without it "
            "Megatron-core would train in FP32 and not say so. Install fp8rl with the extra `gpu`"
        )


def layer_spec(*, qk_norm: bool = False) -> Any:
    """Megatron-core's own layer spec with TE's modules. Raises BackendError as `require`."""
    require()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm)


def build(dims: ModelDims, precision: Precision) -> Any:
    """Megatron-core's GPTModel with TE's layers in FP8, BF16 parameters, on the current CUDA device.

    Its parameters are named as `parameter_name` says. `environment` has to be set before. Not run yet.
    Raises BackendError as `require`, and for Llama 3's rotary embedding, whose factors Megatron-core
    has fixed.
    """
    spec = layer_spec(qk_norm=dims.qk_norm)
    if dims.rope_scaling is not None:
        raise BackendError("Llama 3's scaled rotary embedding is not built with Transformer Engine yet")
    import torch
    from megatron.core.models.gpt.gpt_model import GPTModel

    from fp8rl.model.megatron import transformer_config

    return GPTModel(
        transformer_config(dims, bf16=True, params_dtype=torch.bfloat16, **config_fields(precision)),
        spec,
        vocab_size=dims.vocab,
        max_sequence_length=dims.max_positions,
        share_embeddings_and_output_weights=dims.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=dims.rope_theta,
    )


def parameter_name(megatron_name: str) -> str:
    """The name that a parameter of the name table has in a model built by `layer_spec`."""
    for plain, fused in _FUSED_NORMS.items():
        if megatron_name.endswith(plain):
            return megatron_name.removesuffix(plain) + fused
    return megatron_name
