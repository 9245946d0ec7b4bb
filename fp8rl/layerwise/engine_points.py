"""What the live vLLM model computes in a prefill, seen by hooks on its modules.

What this relies on in vLLM (the names of modules, norms that return the stream beside their output, one
forward pass in the order of the prompts) is held by tests/contract/test_layerwise.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp8rl.layerwise.points import ParityError, Seen
from fp8rl.model.dims import ModelDims

_Look = Callable[[Any, Any], None]


def see_engine(engine: Any, sequences: list[list[int]], *, version: int) -> Seen:
    """Prefills `sequences` in the engine, which holds weight `version`, and keeps every point.

    They go through in one forward pass. Raises ParityError where they do not fit into one, and
    EngineStateError as `Engine.require_version`.
    """
    engine.require_version(version)
    limits = engine.llm.llm_engine.vllm_config.scheduler_config
    tokens = sum(map(len, sequences))
    if tokens > limits.max_num_batched_tokens or len(sequences) > limits.max_num_seqs:
        raise ParityError(
            f"{len(sequences)} sequences of {tokens} tokens do not fit into one forward pass (at most "
            f"{limits.max_num_seqs} sequences and {limits.max_num_batched_tokens} tokens): take fewer"
        )
    seen = Seen(sequences)
    with watched(engine.weights.model, engine.dims, seen):
        scores = engine.score(sequences, version=version)
    seen.points[engine.dims.layers - 1, "logprob"] = torch.tensor(
        [value for row in scores for value in row]
    )
    return seen


@contextmanager
def watched(model: nn.Module, dims: ModelDims, seen: Seen) -> Iterator[None]:
    """Keeps in `seen` what `model` computes in its first forward pass of `seen.sequences`.

    Raises ParityError where that pass has other tokens.
    """
    expected = torch.tensor([token for tokens in seen.sequences for token in tokens])
    handles, started, fault = [], False, False

    def keep(layer: int, point: str, value: Tensor) -> None:
        if started and (layer, point) not in seen.points:  # passes that follow are decoding
            seen.points[layer, point] = value[: len(expected)].flatten(1).clone()

    def after(name: str, look: _Look) -> None:
        def hook(_: Any, args: Any, out: Any) -> None:  # anything returned would replace the output
            look(args, out)

        handles.append(model.get_submodule(name).register_forward_hook(hook))

    def tokens(args: Any, _: Any) -> None:
        nonlocal started, fault
        if not started and not fault:
            started = torch.equal(args[0][: len(expected)].long(), expected)
            fault = not started  # vLLM's step would not recover from an exception

    after("model.embed_tokens", tokens)
    for layer in range(dims.layers):
        for name, look in _looks(dims, layer, keep).items():
            after(f"model.layers.{layer}.{name}", look)
    after("model.norm", lambda _, out: keep(dims.layers - 1, "final_norm", out[0]))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if fault:
        raise ParityError("vLLM's forward pass had other tokens than were sent")


def _looks(dims: ModelDims, layer: int, keep: Callable[[int, str, Tensor], None]) -> dict[str, _Look]:
    """What to keep of each module of a layer, given its arguments and its output."""

    def norm(stream: str, point: str) -> _Look:
        def look(args: Any, out: Any) -> None:
            # The first norm of all has no sum to make, and returns its output alone.
            normed, residual = out if isinstance(out, tuple) else (out, args[0])
            keep(layer, stream, residual)
            keep(layer, point, normed)

        return look

    def parts(names: tuple[str, ...], sizes: tuple[int, ...]) -> _Look:
        def look(_: Any, out: Any) -> None:
            for name, part in zip(names, out[0].split(sizes, -1), strict=True):
                keep(layer, name, part)

        return look

    def attention(args: Any, out: Tensor) -> None:
        for name, value in zip(("q_rotated", "k_rotated"), args, strict=False):
            keep(layer, name, value)
        keep(layer, "attention", out)

    def down(args: Any, out: Any) -> None:
        keep(layer, "activation", args[0])
        keep(layer, "down_proj", out[0])

    qkv, inter = (dims.q_rows, dims.kv_rows, dims.kv_rows), (dims.intermediate,) * 2
    return {
        "input_layernorm": norm("residual", "input_norm"),
        "self_attn.qkv_proj": parts(("q", "k", "v"), qkv),
        "self_attn.attn": attention,
        "self_attn.o_proj": lambda _, out: keep(layer, "o_proj", out[0]),
        "post_attention_layernorm": norm("residual_mid", "post_norm"),
        "mlp.gate_up_proj": parts(("gate", "up"), inter),
        "mlp.down_proj": down,
    }
