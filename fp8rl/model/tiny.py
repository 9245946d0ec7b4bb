"""The tiny model's folder: Hugging Face config and a real tokenizer, made from the recipe."""

import json
import string
from pathlib import Path
from typing import Any

from fp8rl.model.dims import ModelDims, dims_from_hf
from fp8rl.recipe.schema import TinyModel

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
# Every printable ASCII character is a token, so any reasoning-gym question can be written.
ALPHABET = string.digits + string.ascii_letters + string.punctuation + " \n\t"
VOCAB = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *ALPHABET))}


def hf_config(tiny: TinyModel) -> dict[str, Any]:
    """The Hugging Face config of the tiny Llama model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(VOCAB),
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.intermediate_size,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "head_dim": tiny.hidden_size // tiny.heads,
        "max_position_embeddings": tiny.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.02,
        "tie_word_embeddings": tiny.tied_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": VOCAB["<pad>"],
        "bos_token_id": VOCAB["<bos>"],
        "eos_token_id": VOCAB["<eos>"],
        "dtype": "bfloat16",
    }


def write_tiny_model(tiny: TinyModel, folder: Path) -> None:
    """Writes config.json, generation_config.json and the character tokenizer into `folder`."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    config = hf_config(tiny)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    ids = {key: config[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2))

    tokenizer = Tokenizer(WordLevel(VOCAB, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = Fuse()
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", VOCAB["<bos>"])]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def tiny_dims(tiny: TinyModel) -> ModelDims:
    """Dimensions of the tiny model."""
    return dims_from_hf(hf_config(tiny), source="model.tiny")
