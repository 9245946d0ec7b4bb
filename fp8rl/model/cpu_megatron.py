"""Every accommodation that Megatron-core 0.16.1 needs to run on a CPU, and the call it answers.

here                  the Megatron call it answers
--------------------  --------------------------------------------------------------------------
`init_single_rank`    parallel_state.initialize_model_parallel wants a process group: gloo, one rank
`CoreAttention`       DotProductAttention.forward makes CUDA masks and forks the CUDA RNG tracker
`CPU_CONFIG`          TransformerConfig: CPU initialisation, no fused CUDA or jit kernels

tests/contract/test_megatron.py shows what Megatron-core does without them, and holds the result
against transformers, so that an upgrade that changes one of these calls fails there.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8rl.model.engine_attention import as_cached, engine_attention
from fp8rl.model.kv_scales import LayerScales
from fp8rl.model.rotary import Rotary
from fp8rl.model.rounding import MEGATRON

# The CPU flash kernel's backward works on blocks much longer than short sequences are: up to this
# length the plain products are faster, forward and backward together.
_MATH_UP_TO = 128
_MATH, _FLASH = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION

CPU_CONFIG: dict[str, Any] = {
    "use_cpu_initialization": True,
    "perform_initialization": False,  # weights are always loaded, from a file or from our own init
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
}


def init_single_rank() -> None:
    """Initialises torch.distributed (gloo) and Megatron's groups for one rank, once a process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()


QkvObserver = Callable[[int, Tensor, Tensor, Tensor], None]


class CoreAttention(nn.Module):
    """Rotary embedding and causal core attention, grouped queries included: in BF16 by the engine's
    kernel where it is to round as the engine does, else by torch's scaled_dot_product_attention.

    kv_scales: those of the FP8 cache that K and V are rounded to; None: they are not.

    An observer, where one is set, sees the layer number (from 0) and q, k, v [s, b, heads, head_dim]
    as attention gets them: after QK-norm and rotary embedding. KV calibration reads them there.
    """

    rounding = MEGATRON
    rotary: Rotary
    kv_scales: LayerScales | None = None

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any):
        super().__init__()
        self.layer = layer_number - 1  # Megatron counts from 1, over all pipeline stages
        self.softmax_scale = softmax_scale
        self.observer: QkvObserver | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """query [s, b, heads, d]; key, value [s, b, kv_heads, d] -> [s, b, heads * d].

        Sequences are padded on the right: a causal mask alone keeps padding out of real positions.
        """
        if kwargs.get("packed_seq_params") is not None:
            raise NotImplementedError("packed sequences are not supported by the CPU attention")
        query, key = (self.rotary(x, once=self.rounding.rotary) for x in (query, key))
        if self.observer is not None:
            self.observer(self.layer, query, key, value)
        return self.attend(query, key, value)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention of what `forward` has rotated; the same shapes."""
        dtype, scale = query.dtype, self.softmax_scale or query.shape[-1] ** -0.5
        if self.rounding.attention and dtype is torch.bfloat16:
            q, k, v = (t.transpose(0, 1) for t in (query, key, value))
            return engine_attention(q, k, v, scale, self.kv_scales).transpose(0, 1).flatten(2)
        if self.kv_scales is not None:
            kept = as_cached(key, value, self.kv_scales)
            key, value = (x + (y - x).detach() for x, y in zip((key, value), kept, strict=True))
            query = query.float()
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        with sdpa_kernel(_MATH if q.shape[2] <= _MATH_UP_TO else [_FLASH, _MATH]):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.permute(2, 0, 1, 3).flatten(2).to(dtype)
