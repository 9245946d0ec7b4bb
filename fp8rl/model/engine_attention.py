"""Causal attention by the rollout engine's own CPU kernel, with a backward pass of our own.

An attention output that is rounded otherwise in one element in 5,000 is enough: the next linears move
by it, and within a few layers everything differs by as much as BF16 rounds (docs/numerics.md). FP32
sums in another order do that. So the learner's forward calls vLLM's kernel, on K and V as the KV cache
holds them. Its bits depend neither on the batch nor on padding after a token. The backward pass
differentiates FP32 attention of the same K and V; what FP8 rounds of them is passed straight through.

What this relies on in vLLM is held by tests/contract/test_parity.py.
"""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8rl.model.kv_scales import LayerScales
from fp8rl.numerics.kv_cache import cached, for_cpu_kernel

_BLOCK = 32  # tokens


class EngineKernelError(RuntimeError):
    """vLLM's CPU kernels cannot be used here: the text says why, and what to set."""


def library() -> str:
    """The name of the library that vLLM takes its operators from on this CPU, without its ending."""
    if torch.cpu._is_avx512_bf16_supported():
        return "_C"
    return "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"


@cache
def kernels() -> Any:
    """vLLM's operators, without vLLM's Python. Raises EngineKernelError where there are none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise EngineKernelError("precision.parity needs vLLM's CPU build; set precision.parity=false")
    path = Path(spec.submodule_search_locations[0]) / f"{library()}.abi3.so"
    if not path.is_file():
        raise EngineKernelError(
            f"precision.parity: {path.name} is not in the vLLM that is installed, so it is not its CPU "
            "build; set precision.parity=false"
        )
    torch.ops.load_library(str(path))
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    return torch.ops._C


def instructions() -> str:
    """Which of its implementations vLLM takes on this CPU, for heads of a multiple of 32 elements."""
    return "amx" if torch.cpu._is_amx_tile_supported() else "vec"


@torch.no_grad()
def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, scales: LayerScales | None) -> Tensor:
    """q [b, s, heads, d], k and v [b, s, kv_heads, d], BF16 -> [b, s, heads, d].

    scale: of the scores. scales: those of an FP8 cache; None: a BF16 cache.
    """
    ops, isa = kernels(), instructions()
    batch, length, heads, size = q.shape
    kv_heads, blocks = k.shape[2], -(-length // _BLOCK)
    k_scale, v_scale, kind, dtype = 1.0, 1.0, "auto", q.dtype
    if scales is not None:
        k_scale, v_scale, kind, dtype = scales.k, scales.v, "fp8", torch.uint8
        k, v = for_cpu_kernel(k, k_scale), for_cpu_kernel(v, v_scale)
    # K and V of a block stand one after the other, as vLLM cuts its own cache.
    memory = torch.zeros(batch * blocks, kv_heads, 2 * _BLOCK, size, dtype=dtype)
    keys, values = memory.chunk(2, dim=2)
    slots = torch.arange(batch)[:, None] * (blocks * _BLOCK) + torch.arange(length)
    ops.cpu_attn_reshape_and_cache(
        *(k.flatten(0, 1), v.flatten(0, 1), keys, values, slots.flatten()),
        *(isa, k_scale, v_scale, kind),
    )
    starts = torch.arange(batch + 1, dtype=torch.int32) * length
    lengths = torch.full((batch,), length, dtype=torch.int32)
    causal, window, split = True, -1, True
    plan = ops.get_scheduler_metadata(
        *(batch, heads, kv_heads, size, lengths, q.dtype, starts),
        *(causal, window, isa, split, None, kind),
    )
    out = torch.empty(batch * length, heads, size, dtype=q.dtype)
    table = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
    soft_cap = 0.0
    ops.cpu_attention_with_kv_cache(
        *(q.flatten(0, 1), keys, values, out, starts, lengths, scale),
        *(causal, None, window, table, soft_cap, plan, None, None),
        *(k_scale, v_scale, kind),
    )
    return out.view(q.shape)


class _EngineAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, scales: LayerScales | None
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scale, ctx.scales = scale, scales
        return attend(q.contiguous(), k.contiguous(), v.contiguous(), scale, scales)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        q, k, v = ctx.saved_tensors
        wide = tuple(t.detach().requires_grad_() for t in (q.float(), *as_cached(k, v, ctx.scales)))
        with torch.enable_grad():
            out = fp32_attention(wide[0], wide[1], wide[2], ctx.scale)
        found = torch.autograd.grad(out, wide, grad.float())
        return *(g.to(t.dtype) for g, t in zip(found, (q, k, v), strict=True)), None, None


def as_cached(k: Tensor, v: Tensor, scales: LayerScales | None) -> tuple[Tensor, Tensor]:
    """FP32 K and V as a cache with `scales` holds them; None: a BF16 cache."""
    if scales is None:
        return k.float(), v.float()
    return cached(k, scales.k), cached(v, scales.v)


def fp32_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The shapes of `attend`, FP32."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def engine_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, scales: LayerScales | None = None
) -> Tensor:
    """`attend`, with gradients. Raises EngineKernelError as `kernels`."""
    out: Tensor = _EngineAttention.apply(q, k, v, scale, scales)
    return out
