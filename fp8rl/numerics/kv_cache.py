"""K and V as an FP8 KV cache holds them: E4M3 codes times one descale, rounded to nearest.

vLLM's CPU kernel cuts off where FP8 is defined to round to nearest, and GPU kernels do: K and V come
out 4.3% too small on average. So whatever goes into it is rounded here first, by engine and learner
alike (`for_cpu_kernel`).
"""

import torch
from torch import Tensor

from fp8rl.numerics.elements import round_to
from fp8rl.numerics.formats import E4M3


def cached(x: Tensor, descale: Tensor | float) -> Tensor:
    """FP32: what attention reads back of `x`. descale: a number, or FP32 that broadcasts over `x`.

    Magnitudes beyond 448 * descale saturate.
    """
    return round_to((x.float() / descale).clamp_(-E4M3.max, E4M3.max), E4M3).mul_(descale)


def for_cpu_kernel(x: Tensor, descale: Tensor | float) -> Tensor:
    """BF16 of which the part that E4M3 keeps is `cached`, for a kernel that cuts off.

    Greater in magnitude by one to two units of BF16's last place: more than BF16's own error, and less
    than half of E4M3's, which the kernel cuts off again.
    """
    bits = cached(x, descale).view(torch.int32)
    return ((bits + 0x1FFFF) & -0x10000).view(torch.float32).bfloat16()
