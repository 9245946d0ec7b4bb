"""A model whose K and V leave E4M3's range, though its function is that of the model it is made from.

A key head times c and the query heads that read it times 1/c leave every score as it was; a value head
times c and the columns of the output projection that read it times 1/c leave every output. Rotary
embedding turns pairs within a head, so it does not mind. Powers of two change no bit of what follows,
in BF16 as in FP32.
"""

import torch
from torch import Tensor

from fp8rl.model.dims import ModelDims


def rescaled(
    weights: dict[str, Tensor], dims: ModelDims, keys: list[list[int]], values: list[list[int]]
) -> dict[str, Tensor]:
    """A copy of `weights` (by Hugging Face name). keys, values: exponents of two by which K and V of
    each layer's KV heads grow, [layers][kv_heads].
    """
    out = dict(weights)
    group = dims.heads // dims.kv_heads
    for number in range(dims.layers):
        attention = f"model.layers.{number}.self_attn"
        of_keys, of_values = (
            torch.tensor([2.0**e for e in exponents[number]]).repeat_interleave(dims.head_dim)
            for exponents in (keys, values)
        )

        def for_queries(grown: Tensor) -> Tensor:
            """Of each KV head's factors those of the query heads that read it, inverted."""
            return 1 / grown.view(dims.kv_heads, -1).repeat_interleave(group, 0).flatten()

        for name, factors in (
            ("k_proj", of_keys[:, None]),
            ("q_proj", for_queries(of_keys)[:, None]),
            ("v_proj", of_values[:, None]),
            ("o_proj", for_queries(of_values)[None]),
        ):
            full = f"{attention}.{name}.weight"
            out[full] = weights[full] * factors.to(weights[full].dtype)
    return out
