"""KV calibration inside vLLM: what its attention gets, seen in a pass that uses no cache and no scale.

While the hooks are set, each `Attention` module shows q, k and v to the observer and computes exact
causal attention from them in their own BF16, instead of writing them to the FP8 cache and reading them
back: so scales that are stale or missing do not colour what the layers above see. The scales are set
afterwards, from all of it: observe, then freeze. (vLLM's own calibration, now removed, took them from
the first forward pass, whatever that was.)

What this relies on in vLLM is held by tests/contract/test_kv_calibration.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8rl.model.kv_observer import KvObserver
from fp8rl.model.kv_scales import KvScalesError


class Observation:
    """What went wrong while the hooks were set. fault: in words, the first; None: nothing."""

    def __init__(self) -> None:
        self.fault: str | None = None
        self.tokens = 0
        """Tokens that the last layer saw."""


def observe(llm: Any, layers: list[Any], prompts: list[list[int]], observer: KvObserver) -> None:
    """Has `observer` see q, k, v of all tokens of `prompts`, by vLLM's engine `llm`.

    What the prefix cache holds afterwards was never written: drop it. Raises KvScalesError where a
    prompt does not fit into one forward pass, and where attention saw other tokens than these.
    """
    from vllm import SamplingParams

    limits = llm.llm_engine.vllm_config.scheduler_config
    parts = batches(
        [len(tokens) for tokens in prompts],
        most_tokens=limits.max_num_batched_tokens,
        most_sequences=limits.max_num_seqs,
    )
    # What is common to two prompts is computed for each: every sequence is whole.
    parameters = SamplingParams(
        temperature=0.0, max_tokens=1, detokenize=False, skip_reading_prefix_cache=True
    )
    with observed(layers, observer) as observation:
        for part in parts:
            observer.start_tokens(sum(map(len, prompts[part])))
            asked = [{"prompt_token_ids": tokens} for tokens in prompts[part]]
            llm.generate(asked, parameters, use_tqdm=False)
    if observation.fault is None and observation.tokens != observer.tokens:
        observation.fault = f"attention saw {observation.tokens} of {observer.tokens} tokens"
    if observation.fault is not None:
        raise KvScalesError(f"KV calibration in the engine: {observation.fault}")


@contextmanager
def observed(layers: list[Any], observer: KvObserver) -> Iterator[Observation]:
    """Has `observer` see q, k, v [tokens, heads, head_dim] of each of vLLM's `Attention` modules.

    Raises KvScalesError for attention that is more than causal (windows, soft caps, sinks, biases).
    A sequence of which an earlier part would have to come from the cache is a fault of the Observation:
    nothing is raised inside vLLM's step, which does not recover from that.
    """
    for layer in layers:
        _require_plain(layer)
    observation = Observation()
    try:
        for number, layer in enumerate(layers):
            layer.forward = _hook(layer, number, number == len(layers) - 1, observer, observation)
        yield observation
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)  # the class's own shows again


def _require_plain(layer: Any) -> None:
    impl = layer.impl
    extras = {
        "sliding_window": getattr(impl, "sliding_window", None) not in (None, -1, (-1, -1)),
        "logits_soft_cap": bool(getattr(impl, "logits_soft_cap", 0)),
        "alibi_slopes": getattr(impl, "alibi_slopes", None) is not None,
        "sinks": getattr(impl, "sinks", None) is not None,
    }
    found = [name for name, is_set in extras.items() if is_set]
    if found:
        raise KvScalesError(f"KV calibration in the engine does not know attention with {found}")


def _hook(
    layer: Any, number: int, is_last: bool, observer: KvObserver, observation: Observation
) -> Callable[..., Tensor]:
    from vllm.model_executor.layers.attention.attention import get_attention_context

    def forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        q = query.view(-1, layer.num_heads, layer.head_size)
        k = key.view(-1, layer.num_kv_heads, layer.head_size)
        v = value.view(-1, layer.num_kv_heads, layer.head_size_v)
        out = torch.zeros_like(q)
        metadata = get_attention_context(layer.layer_name)[0]
        starts = metadata.query_start_loc.tolist()
        fault = _not_whole(starts, metadata.seq_lens.tolist())
        if fault is not None:
            observation.fault = observation.fault or fault
            return out.flatten(1)
        tokens = metadata.num_actual_tokens
        observer(number, q[:tokens], k[:tokens], v[:tokens])
        if is_last:
            observation.tokens += tokens
        for a, b in pairwise(starts):
            out[a:b] = _causal(q[a:b], k[a:b], v[a:b], layer.impl.scale)
        return out.flatten(1)

    return forward


def _not_whole(starts: list[int], lengths: list[int]) -> str | None:
    """Why the sequences that begin at `starts` are not all whole in this forward; None: they are."""
    for index, length in enumerate(lengths[: len(starts) - 1]):
        here = starts[index + 1] - starts[index]
        if here != length:
            return (
                f"a sequence of {length} tokens is not whole in a forward pass ({here} of them): vLLM "
                "split it, or its beginning came from the prefix cache"
            )
    return None


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """[tokens, heads, head_dim] of one sequence -> the same, attended."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[0].transpose(0, 1)


def batches(lengths: list[int], *, most_tokens: int, most_sequences: int) -> list[slice]:
    """Consecutive sequences of `lengths` that fit into one forward pass each.

    Raises KvScalesError for one that is longer than `most_tokens`.
    """
    found, start, tokens = [], 0, 0
    for index, length in enumerate(lengths):
        if length > most_tokens:
            raise KvScalesError(
                f"KV calibration in the engine: sequence {index} has {length} tokens, one forward pass "
                f"takes {most_tokens}"
            )
        if tokens + length > most_tokens or index - start == most_sequences:
            found.append(slice(start, index))
            start, tokens = index, 0
        tokens += length
    return [*found, slice(start, len(lengths))] if lengths else []
