"""Converts a GGUF file to a Hugging Face folder: `python -m fp8rl.model.gguf FILE FOLDER`.

transformers reads the file and undoes what the format does to a Llama model (block quantisation, the
order of the rows of q and k). What it leaves to chance is checked here.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from fp8rl.journal import MODEL_FILE
from fp8rl.model.dims import UnsupportedModelError, dims_from_hf

# How a byte-level vocabulary splits text before its merges, by tokenizer.ggml.pre. transformers
# takes GPT-2's way for any name that it does not know, so a name is accepted here once it is known
# to be right: as transformers has it, or, for SmolLM, with every digit by itself first.
_AS_IN_TRANSFORMERS = ("default", "gpt-2", "llama-bpe")
_DIGITS_APART = ("smollm",)


# A Llama model's tensors as llama.cpp names them. transformers passes over any other without a word.
_TENSOR = re.compile(
    r"(token_embd|output_norm|output"
    r"|blk\.\d+\.(attn_(norm|q|k|v|output)|ffn_(norm|gate|up|down)))\.weight"
)


class GgufError(ValueError):
    """A GGUF file that cannot become a model folder."""


def convert(file: Path, folder: Path) -> None:
    """Writes config.json, generation_config.json, BF16 weights and the tokenizer into `folder`.

    Raises UnsupportedModelError for a model that fp8rl does not build, and GgufError for tensors that
    do not make up the model and for a tokenizer that would not be the model's own.
    """
    import torch
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    reader = GGUFReader(file)
    _require_all_known(reader)
    source = {"gguf_file": file.name, "local_files_only": True}
    config = AutoConfig.from_pretrained(file.parent, **source)
    dims = dims_from_hf(_plain(config), source=file.name)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    _set_pre_tokenizer(tokenizer, reader)
    _require_end_token(tokenizer)
    weights = _weights(file, config)
    if dims.tied_embeddings:
        weights.pop("lm_head.weight", None)

    from safetensors.torch import save_file

    rounded = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(rounded, folder / MODEL_FILE, metadata={"format": "pt"})
    values = _plain(config) | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    ids = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _require_all_known(reader: Any) -> None:
    """Raises GgufError where the file holds what transformers would leave out of the model."""
    unknown = [tensor.name for tensor in reader.tensors if not _TENSOR.fullmatch(tensor.name)]
    if unknown:
        raise GgufError(
            f"tensors that a Llama model of fp8rl does not have: {', '.join(sorted(unknown)[:5])}"
        )
    scaling = {key: field.contents() for key, field in reader.fields.items() if ".rope.scaling." in key}
    if scaling and set(scaling.values()) != {"none"}:
        raise GgufError(f"a scaled rotary embedding is not supported yet: {scaling}")


def _plain(config: Any) -> dict[str, Any]:
    """The config as the dense model has it, without where it was read from."""
    values: dict[str, Any] = config.to_dict()
    return {k: v for k, v in values.items() if k not in ("quantization_config", "_name_or_path")}


def _weights(file: Path, config: Any) -> dict[str, Any]:
    """FP32 tensors by Hugging Face name."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model, info = AutoModelForCausalLM.from_pretrained(
        file.parent,
        config=config,
        gguf_file=file.name,
        local_files_only=True,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    # Missing tensors would be drawn at random, with a warning only.
    problems = {key: sorted(map(str, names)) for key, names in info.items() if names}
    if problems:
        raise GgufError(f"the tensors do not make up the model: {problems}")
    weights: dict[str, Any] = model.state_dict()
    return weights


def _set_pre_tokenizer(tokenizer: Any, reader: Any) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    fields = reader.fields
    if fields["tokenizer.ggml.model"].contents() != "gpt2":
        return  # no splitting by a pattern
    held = fields.get("tokenizer.ggml.pre")
    pre = "default" if held is None else held.contents()
    if pre in _DIGITS_APART:
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    elif pre not in _AS_IN_TRANSFORMERS:
        known = ", ".join((*_AS_IN_TRANSFORMERS, *_DIGITS_APART))
        raise GgufError(
            f"tokenizer.ggml.pre={pre!r}: how this vocabulary splits text is not known here ({known} "
            "are), and a wrong guess changes prompts unseen. Convert the model yourself and use "
            "model.path"
        )


def _require_end_token(tokenizer: Any) -> None:
    """The end token must be what ends a turn of the chat template, or generation would run on."""
    if tokenizer.eos_token_id is None:
        raise GgufError("no tokenizer.ggml.eos_token_id: generation would never end")
    if tokenizer.chat_template is None:
        return
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "reply"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    after = text.rpartition("reply")[2].lstrip()
    if not after.startswith(tokenizer.eos_token):
        raise GgufError(
            f"the chat template ends a turn with {after[:20]!r}, the tokenizer's end token is "
            f"{tokenizer.eos_token!r}: generation would run on"
        )


def main() -> int:
    """Converts what the command line names. Exit code 2 with one line for what the file is to blame."""
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except (GgufError, UnsupportedModelError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
