"""Small random models of each family that is supported, as transformers writes them to a folder."""

from pathlib import Path
from typing import Any

import torch

from fp8rl.model.tiny import VOCAB, write_tiny_model
from fp8rl.recipe.schema import TinyModel

# No size is a multiple of 128 by luck; three query heads share a KV head.
_COMMON: dict[str, Any] = {
    "vocab_size": len(VOCAB),
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "pad_token_id": VOCAB["<pad>"],
    "bos_token_id": VOCAB["<bos>"],
    "eos_token_id": VOCAB["<eos>"],
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# family: (config class, its own values). Qwen3's heads are wider than hidden / heads.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", {"head_dim": 64, "tie_word_embeddings": True}),
}


def hf_family(family: str, seed: int = 0, **sizes: int) -> Any:
    """transformers' own model with random weights: matrices that attention can tell apart, norms around
    1, biases that matter. FP32, eager attention. sizes: values of the config that differ."""
    import transformers

    name, values = FAMILIES[family]
    config = getattr(transformers, name)(**_COMMON | values | sizes, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = "norm" in key
        parameter.data = 1 + 0.1 * noise if is_norm else noise * (0.3 if "bias" in key else 0.06)
    model.tie_weights()
    return model


def write_family(family: str, folder: Path, seed: int = 0, **sizes: int) -> Path:
    """A folder as `save_pretrained` makes it, with the tiny model's character tokenizer."""
    write_tiny_model(TinyModel(), folder)
    hf_family(family, seed, **sizes).save_pretrained(folder)
    return folder
