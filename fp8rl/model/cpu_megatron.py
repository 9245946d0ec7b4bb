"""Every accommodation that Megatron-core 0.16.1 needs to run on a CPU, and the call it answers.

here                  the Megatron call it answers
--------------------  --------------------------------------------------------------------------
`init_single_rank`    parallel_state.initialize_model_parallel wants a process group: gloo, one rank
`CpuRotaryEmbedding`  RotaryEmbedding.get_emb moves inv_freq to torch.cuda.current_device()
`SdpaAttention`       DotProductAttention.forward makes CUDA masks and forks the CUDA RNG tracker
`CPU_CONFIG`          TransformerConfig: CPU initialisation, no fused CUDA or jit kernels

tests/contract/test_megatron.py shows what Megatron-core does without them, and holds the result
against transformers, so that an upgrade that changes one of these calls fails there.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8rl.model.dims import Llama3Rope

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


class CpuRotaryEmbedding(RotaryEmbedding):
    """Megatron's rotary embedding, with its frequencies left where they are."""

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """[seq, 1, 1, head_dim] FP32 angles, halves repeated (not interleaved)."""
        freqs = self.get_freqs_non_repeated(max_seq_len, offset)
        return torch.cat((freqs, freqs), dim=-1)[:, None, None, :]


def llama3_frequencies(inv_freq: Tensor, rope: Llama3Rope) -> Tensor:
    """FP32 [head_dim / 2]: rotary frequencies as Llama 3.1 stretches them.

    A frequency whose wave is longer than original_max_positions / low_freq_factor is divided by
    `factor`; one that is shorter than original_max_positions / high_freq_factor stays; in between the
    two are mixed. Source: Llama 3.1's reference code (apply_scaling). Megatron-core has its own with
    fixed factors.
    """
    waves = 2 * math.pi / inv_freq
    turns = rope.original_max_positions / waves
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    mixed = (1 - share) * inv_freq / rope.factor + share * inv_freq
    found = torch.where(turns < rope.low_freq_factor, inv_freq / rope.factor, mixed)
    return torch.where(turns > rope.high_freq_factor, inv_freq, found)


QkvObserver = Callable[[int, Tensor, Tensor, Tensor], None]


class SdpaAttention(nn.Module):
    """Causal core attention by torch's scaled_dot_product_attention, grouped queries included.

    An observer, where one is set, sees the layer number (from 0) and q, k, v [s, b, heads, head_dim]
    as attention gets them: after QK-norm and rotary embedding. KV calibration reads them there.
    """

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
        if self.observer is not None:
            self.observer(self.layer, query, key, value)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        with sdpa_kernel(_MATH if q.shape[2] <= _MATH_UP_TO else [_FLASH, _MATH]):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.permute(2, 0, 1, 3).flatten(2)
