"""Rounding to FP8 and FP8's byte codes, by FP32 bit patterns.

PyTorch's own float8 <-> float32 casts cost milliseconds per small matrix on a CPU. Both directions
are exact with a few integer and FP32 operations instead, and the tests hold them against the casts
on every code and on values around every rounding boundary.
"""

import torch
from torch import Tensor

from fp8rl.numerics.formats import E4M3, E5M2, Element

_EXPONENT_MASK = 0x7F800000
_FP32_MANTISSA_BITS = 23
_FP32_BIAS = 127

DTYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


def rounder(element: Element) -> float:
    """The constant that rounds a value when added and subtracted, as a multiple of its power of two.

    1.5 * 2^(23 - m) puts the last kept mantissa bit (m bits after the leading one) at the last bit of
    an FP32 sum. The hardware then rounds to nearest, ties to even.
    """
    return 1.5 * 2.0 ** (_FP32_MANTISSA_BITS - element.mantissa_bits)


def round_to(x: Tensor, element: Element) -> Tensor:
    """Rounds `x` (FP32, |x| <= element.max) to the nearest FP8 value, ties to even; returns FP32."""
    power = (x.view(torch.int32) & _EXPONENT_MASK).view(torch.float32).clamp_min_(element.min_normal)
    power.mul_(rounder(element))
    # Adding and subtracting loses the sign of zero; FP8 keeps it.
    return (x + power).sub_(power).copysign_(x)


# Subnormals are handled as integers: libraries built with fast-math switch FP32 subnormals off for
# the whole process, which a shift of the exponent range would run into.


def rebias(element: Element) -> int:
    """The difference of the exponent biases, at the place where a code has its exponent."""
    return (_FP32_BIAS - element.exponent_bias) << element.mantissa_bits


def encode(values: Tensor, element: Element) -> Tensor:
    """Byte codes (uint8) of FP32 `values` that already lie on the element's grid."""
    bits = values.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude >> (_FP32_MANTISSA_BITS - element.mantissa_bits)) - rebias(element)
    subnormal = (values.abs() / element.min_subnormal).to(torch.int32)
    code = torch.where(values.abs() < element.min_normal, subnormal, normal)
    return (code | (bits >> 24) & 0x80).to(torch.uint8)


def decode(codes: Tensor, element: Element) -> Tensor:
    """FP32 values of byte `codes` (uint8, or the float8 dtype).

    Raises ValueError where a code is NaN or Inf.
    """
    bits = codes.view(torch.uint8).to(torch.int32)
    code = bits & 0x7F
    if bool((code >= element.first_special).any()):
        raise ValueError(f"an {element.name.upper()} tensor holds a NaN or Inf code")
    normal = ((code + rebias(element)) << (_FP32_MANTISSA_BITS - element.mantissa_bits)).view(
        torch.float32
    )
    magnitude = torch.where(code < (1 << element.mantissa_bits), code * element.min_subnormal, normal)
    return torch.where(bits >= 0x80, -magnitude, magnitude)
