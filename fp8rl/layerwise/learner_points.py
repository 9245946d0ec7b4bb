"""What the learner computes: of the tokens alone, and of each input that the engine had.

The first shows how a difference grows, the second where one is made: every operation of the learner is
given the engine's own input, so that what differs in its output is its own doing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fp8rl.layerwise.points import Seen
from fp8rl.learner.batch import Batch, make_batch
from fp8rl.learner.logprobs import token_logprobs
from fp8rl.model.megatron import PolicyModel


@torch.no_grad()
def see_learner(model: PolicyModel, sequences: list[list[int]]) -> Seen:
    """What `model` makes of `sequences`, in one forward pass."""
    batch = make_batch([tokens[:1] for tokens in sequences], [tokens[1:] for tokens in sequences])
    seen = Seen(sequences)
    with _watched(model, batch, seen):
        logits = model(batch.tokens)
    seen.points[model.dims.layers - 1, "logprob"] = token_logprobs(logits, batch.tokens, 1.0)[0][
        batch.mask
    ]
    return seen


@contextmanager
def _watched(model: PolicyModel, batch: Batch, seen: Seen) -> Iterator[None]:
    handles = []

    def keep(layer: int, point: str, value: Tensor) -> None:
        """value: [seq, batch, ...]."""
        seen.points[layer, point] = value.transpose(0, 1)[batch.valid].flatten(1).clone()

    def after(module: Any, look: Callable[[Any, Any], None]) -> None:
        def hook(_: Any, args: Any, out: Any) -> None:
            look(args, out)

        handles.append(module.register_forward_hook(hook))

    def norm(layer: int, stream: str, point: str) -> Callable[[Any, Any], None]:
        def look(args: Any, out: Tensor) -> None:
            keep(layer, stream, args[0].to(model.compute_dtype))
            keep(layer, point, out)

        return look

    def parts(layer: int, slot: str, names: tuple[str, ...]) -> Callable[[Any, Any], None]:
        def look(_: Any, out: Any) -> None:
            for name, part in zip(names, model.split_outputs(slot, out[0]), strict=True):
                keep(layer, name, part)

        return look

    def whole(layer: int, point: str) -> Callable[[Any, Any], None]:
        def look(_: Any, out: Any) -> None:
            keep(layer, point, out[0] if isinstance(out, tuple) else out)

        return look

    def down(layer: int) -> Callable[[Any, Any], None]:
        def look(args: Any, out: Any) -> None:
            keep(layer, "activation", args[0])
            keep(layer, "down_proj", out[0])

        return look

    for i, layer in enumerate(model.gpt.decoder.layers):
        attention, mlp, base = layer.self_attention, layer.mlp, f"decoder.layers.{i}"
        qkv, fc1 = f"{base}.self_attention.linear_qkv.weight", f"{base}.mlp.linear_fc1.weight"
        after(layer.input_layernorm, norm(i, "residual", "input_norm"))
        after(attention.linear_qkv, parts(i, qkv, ("q", "k", "v")))
        after(attention.core_attention, whole(i, "attention"))
        after(attention.linear_proj, whole(i, "o_proj"))
        after(layer.pre_mlp_layernorm, norm(i, "residual_mid", "post_norm"))
        after(mlp.linear_fc1, parts(i, fc1, ("gate", "up")))
        after(mlp.linear_fc2, down(i))
    after(model.gpt.decoder.final_layernorm, whole(model.dims.layers - 1, "final_norm"))

    def rotated(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        keep(layer, "q_rotated", q)
        keep(layer, "k_rotated", k)

    model.set_observer(rotated)
    try:
        yield
    finally:
        model.set_observer(None)
        for handle in handles:
            handle.remove()


@torch.no_grad()
def replay(model: PolicyModel, engine: Seen) -> Seen:
    """Every operation of `model`, given what the engine's had as input.

    The stream that the model begins with is not computed from anything: it is not in the result.
    """
    seen = Seen(engine.sequences)
    dims, last = model.dims, model.dims.layers - 1
    before: tuple[Tensor, Tensor] | None = None
    for i, layer in enumerate(model.gpt.decoder.layers):

        def given(point: str, i: int = i) -> Tensor:
            return engine[i, point][:, None]  # [tokens, 1, features], as Megatron has them

        def keep(point: str, value: Tensor, i: int = i) -> None:
            seen.points[i, point] = value.flatten(1).to(model.compute_dtype)

        stream = given("residual")
        if before is not None:
            stream = layer.mlp_bda.add((before[0], None), before[1], 0.0)
            keep("residual", stream)
        keep("input_norm", layer.input_layernorm(stream))
        attention, base = layer.self_attention, f"decoder.layers.{i}"
        out = attention.linear_qkv(given("input_norm"))[0]
        heads = model.split_outputs(f"{base}.self_attention.linear_qkv.weight", out)
        for name, part in zip(("q", "k", "v"), heads, strict=True):
            keep(name, part)
        _replay_attention(attention, engine, i, dims.head_dim, keep)
        keep("o_proj", attention.linear_proj(given("attention"))[0])
        stream = layer.self_attn_bda.add((given("o_proj"), None), given("residual"), 0.0)
        keep("residual_mid", stream)
        keep("post_norm", layer.pre_mlp_layernorm(stream))
        out = layer.mlp.linear_fc1(given("post_norm"))[0]
        for name, part in zip(("gate", "up"), out.chunk(2, -1), strict=True):
            keep(name, part)
        # Megatron's gated MLP makes this within its forward.
        keep("activation", model.gpt.config.activation_func(given("gate")) * given("up"))
        keep("down_proj", layer.mlp.linear_fc2(given("activation"))[0])
        before = (given("down_proj"), given("residual_mid"))
    assert before is not None
    stream = model.gpt.decoder.layers[last].mlp_bda.add((before[0], None), before[1], 0.0)
    seen.points[last, "final_norm"] = model.gpt.decoder.final_layernorm(stream).flatten(1)
    seen.points[last, "logprob"] = _logprobs(model, engine[last, "final_norm"], engine.sequences)
    return seen


def _replay_attention(
    attention: Any, engine: Seen, layer: int, head_dim: int, keep: Callable[[str, Tensor], None]
) -> None:
    """By sequence: QK-norm and rotation of q and k, and attention of what the engine rotated."""
    core = attention.core_attention

    def heads(point: str) -> list[Tensor]:
        parts = engine[layer, point].unflatten(1, (-1, head_dim))[:, None]
        return list(parts.split(engine.lengths))

    for name, norm in (("q", attention.q_layernorm), ("k", attention.k_layernorm)):
        rows = [part if norm is None else norm(part) for part in heads(name)]
        turned = [core.rotary(part, once=core.rounding.rotary) for part in rows]
        keep(f"{name}_rotated", torch.cat(turned))
    attended = [
        core.attend(q, k, v)
        for q, k, v in zip(heads("q_rotated"), heads("k_rotated"), heads("v"), strict=True)
    ]
    keep("attention", torch.cat(attended))


def _logprobs(model: PolicyModel, normed: Tensor, sequences: list[list[int]]) -> Tensor:
    """Log-probs of every token but the first, by the output projection of `normed` [tokens, hidden]."""
    found = []
    for rows, tokens in zip(normed.split([len(s) for s in sequences]), sequences, strict=True):
        logits = model.project(rows)
        found.append(token_logprobs(logits[None], torch.tensor([tokens]), 1.0)[0][0])
    return torch.cat(found)
