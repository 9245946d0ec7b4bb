"""Small random models for the tests: a Hugging Face folder with weights, config and tokenizer."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from fp8rl.model.names import name_table
from fp8rl.model.tiny import hf_config, model_dims, write_tiny_model
from fp8rl.recipe.schema import Model, Recipe, TinyModel

# No dimension is a multiple of 128, three query heads share a KV head, as in SmolLM2-135M.
RAGGED = TinyModel(
    hidden_size=192, intermediate_size=320, layers=2, heads=6, kv_heads=2, max_positions=128
)


def random_weights(tiny: TinyModel, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights by Hugging Face name, large enough that attention is not flat."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for slot in name_table(model_dims(Model(tiny=tiny))):
        for name, rows in zip(slot.hf, slot.rows, strict=True):
            if slot.columns is None:
                weights[name] = 1 + 0.1 * torch.randn(rows, generator=generator)
            else:
                weights[name] = torch.randn(rows, slot.columns, generator=generator) * 0.06
    return weights


def write_model(tiny: TinyModel, folder: Path, seed: int = 0) -> Path:
    """A folder that transformers, the learner and vLLM all load."""
    write_tiny_model(tiny, folder)
    save_file(random_weights(tiny, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def hf_model(tiny: TinyModel, weights: dict[str, torch.Tensor]):
    """transformers' own model with `weights`, FP32, eager attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{k: v for k, v in hf_config(tiny).items() if k != "dtype"})
    model = LlamaForCausalLM(config).float().eval()
    tied = {"lm_head.weight": weights["model.embed_tokens.weight"]} if tiny.tied_embeddings else {}
    model.load_state_dict(weights | tied)
    return model


def recipe_with(**sections) -> Recipe:
    """A recipe from nested plain values."""
    return Recipe.model_validate(sections)
