"""Small random models for the tests: a Hugging Face folder with weights, config and tokenizer."""

import string
from pathlib import Path

import torch
from safetensors.torch import save_file

from fp8rl.model.manifest import SCALE_FORMAT, SCALE_SUFFIX, Manifest, Spec
from fp8rl.model.names import name_table
from fp8rl.model.published import dtype_name, write_published
from fp8rl.model.tiny import hf_config, tiny_dims, write_tiny_model
from fp8rl.recipe.schema import Recipe, TinyModel

# No dimension is a multiple of 128, three query heads share a KV head, as in SmolLM2-135M.
RAGGED = TinyModel(
    hidden_size=192, intermediate_size=320, layers=2, heads=6, kv_heads=2, max_positions=128
)


def random_weights(tiny: TinyModel, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights by Hugging Face name, large enough that attention is not flat."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for slot in name_table(tiny_dims(tiny)):
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


def specs_of(tensors: dict[str, torch.Tensor]) -> list[Spec]:
    """How the learner would specify these tensors."""
    specs = []
    for name, tensor in tensors.items():
        fmt, scale = "bf16", None
        if name.endswith(SCALE_SUFFIX):
            fmt = SCALE_FORMAT
        elif tensor.dtype is torch.float8_e4m3fn:
            fmt, scale = "fp8_block", name + SCALE_SUFFIX
        specs.append(Spec(name, tuple(tensor.shape), dtype_name(tensor), fmt, scale))
    return specs


def publish(folder: Path, version: int, tensors: dict[str, torch.Tensor]) -> Manifest:
    """Publishes tensors of the test's own making."""
    return write_published(folder, version, specs_of(tensors), tensors.items())


def recipe_with(**sections) -> Recipe:
    """A recipe from nested plain values."""
    return Recipe.model_validate(sections)


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unused|>"]
# As many tokens as the tiny model has; "ĊĊ" (two line feeds) is the only merge.
GGUF_TOKENS = [*_SPECIAL, *string.digits, *string.ascii_letters, *string.punctuation, "Ġ", "Ċ", "ĊĊ"]


def write_gguf(tiny: TinyModel, path: Path, *, leave_out: str = "", **fields) -> Path:
    """A GGUF file with `random_weights`, a byte-level tokenizer and a chat template, laid out as
    llama.cpp does: rows of q and k in pairs. fields: tokenizer fields to change, by their last name.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(tiny.layers)
    writer.add_context_length(tiny.max_positions)
    writer.add_embedding_length(tiny.hidden_size)
    writer.add_feed_forward_length(tiny.intermediate_size)
    writer.add_head_count(tiny.heads)
    writer.add_head_count_kv(tiny.kv_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(tiny.hidden_size // tiny.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(GGUF_TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields.get("pre", "smollm"))
    writer.add_token_list(GGUF_TOKENS)
    writer.add_token_types([3] * len(_SPECIAL) + [1] * (len(GGUF_TOKENS) - len(_SPECIAL)))
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(fields.get("eos_token_id", 2))
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, weight in random_weights(tiny).items():
        if name == leave_out:
            continue
        values = weight.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = tiny.heads if "q_proj" in name else tiny.kv_heads
            halves = values.reshape(heads, 2, -1, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape).copy()
        writer.add_tensor(_gguf_name(name), values)
    if "extra_tensor" in fields:
        writer.add_tensor(fields["extra_tensor"], random_weights(tiny)["model.norm.weight"].numpy())
    if "rope_scaling" in fields:
        writer.add_rope_scaling_type(gguf.RopeScalingType(fields["rope_scaling"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for ours, theirs in parts.items():
        name = name.replace(ours, theirs)
    return name
