"""The dimensions of a model, read from its Hugging Face config. Imports without torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What each family has by its own definition, whatever its config says: (biases of q, k and v, QK-norm).
_FAMILIES = {"llama": (False, False), "qwen2": (True, False), "qwen3": (False, True)}
SUPPORTED_MODEL_TYPES = tuple(_FAMILIES)
_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
# How configs of recurrent and hybrid models begin the names of what Llama does not have.
_RECURRENT = ("mamba", "ssm", "linear_", "hybrid", "rwkv", "recurrent", "conv_kernel", "attn_layer_")
_NOT_ATTENTION = (
    "only full attention in every layer is supported; recurrent and linear-attention layers have no K "
    "and V that an FP8 cache could be calibrated on, and windowed ones are not built"
)


class UnsupportedModelError(ValueError):
    """The model's config asks for something that fp8rl does not build."""


@dataclass(frozen=True)
class Llama3Rope:
    """How Llama 3.1 and later stretch rotary frequencies beyond the context they were trained on."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelDims:
    """Sizes of a decoder of the Llama, Qwen2 or Qwen3 family. head_dim need not be hidden / heads."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied_embeddings: bool
    max_positions: int
    rope_theta: float
    norm_eps: float
    init_std: float
    qk_norm: bool = False
    """Whether queries and keys are normalised, each head by itself, before attention."""
    qkv_bias: bool = False
    """Whether q, k and v have biases; nothing else has."""
    rope_scaling: Llama3Rope | None = None

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim


def dims_from_hf(config: dict[str, Any], *, source: str = "config.json") -> ModelDims:
    """Dimensions from a Hugging Face config dict.

    Raises UnsupportedModelError naming the field that is not supported.
    """

    def refuse(field: str, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{source}: {field}={config.get(field)!r}: {why}")

    for field in config:
        if config[field] and field.startswith(_RECURRENT):
            raise refuse(field, _NOT_ATTENTION)
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise refuse("layer_types", f"{_NOT_ATTENTION} ({', '.join(sorted(kinds))})")
    if config.get("model_type") not in SUPPORTED_MODEL_TYPES:
        raise refuse("model_type", f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}")
    qkv_bias, qk_norm = _FAMILIES[config["model_type"]]
    for field in ("use_qk_norm", "qk_norm"):
        if config.get(field):
            raise refuse(field, "QK-norm is supported where the family has it (qwen3)")
    for field in ("attention_bias", "mlp_bias"):
        if config.get(field):
            raise refuse(field, "biases are supported of q, k and v where the family has them (qwen2)")
    if config.get("use_sliding_window"):
        raise refuse("use_sliding_window", _NOT_ATTENTION)
    if config.get("quantization_config"):
        raise refuse("quantization_config", "the initial weights must not be quantised")
    if config.get("hidden_act", "silu") != "silu":
        raise refuse("hidden_act", "only silu (SwiGLU) is supported")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        raise refuse(field, "supported rotary embeddings: default and llama3")
    if config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise refuse("partial_rotary_factor", "only full rotary embeddings are supported")
    missing = [key for key in _REQUIRED if key not in config]
    if missing:
        raise UnsupportedModelError(f"{source}: missing {', '.join(missing)}")
    heads = config["num_attention_heads"]
    return ModelDims(
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_positions=config.get("max_position_embeddings", 2048),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        init_std=float(config.get("initializer_range", 0.02)),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        rope_scaling=_llama3(rope, source) if kind == "llama3" else None,
    )


def _llama3(rope: dict[str, Any], source: str) -> Llama3Rope:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [name for name in names if name not in rope]
    if missing:
        raise UnsupportedModelError(
            f"{source}: rope_parameters of type llama3 lack {', '.join(missing)}"
        )
    factor, low, high, positions = (rope[name] for name in names)
    return Llama3Rope(float(factor), float(low), float(high), int(positions))


def read_dims(model_dir: Path) -> ModelDims:
    """Dimensions of the Hugging Face model in `model_dir`."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise UnsupportedModelError(f"{model_dir}: no config.json; not a Hugging Face model folder")
    return dims_from_hf(json.loads(path.read_text()), source=str(path))
