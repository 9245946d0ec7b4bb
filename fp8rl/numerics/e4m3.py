"""E4M3 (float8_e4m3fn) rounding and byte codes, by FP32 bit patterns.

E4M3 has 4 exponent bits (bias 7) and 3 mantissa bits; the largest finite value is 448, the
smallest normal 2^-6, the smallest subnormal 2^-9.

PyTorch's own float8 <-> float32 casts cost milliseconds per small matrix on a CPU. Both directions
are exact with a few integer and FP32 operations instead, and the tests hold them against the casts
on every code and on values around every rounding boundary.
"""

import torch
from torch import Tensor

_MIN_NORMAL = 2.0**-6
_EXPONENT_MASK = 0x7F800000
# 1.5 * 2^20 times the value's power of two puts the last kept mantissa bit (3 bits after the
# leading one) at the last bit of an FP32 sum: 23 - 20 = 3. The hardware then rounds to nearest even.
_ROUNDER = 1.5 * 2.0**20
_MIN_SUBNORMAL = 2.0**-9
# The exponent biases differ by 120 (127 - 7): so many steps of the exponent field, 3 bits up.
_REBIAS = 120 << 3


def round_to_e4m3(x: Tensor) -> Tensor:
    """Rounds `x` (FP32, |x| <= 448) to the nearest E4M3 value, ties to even; returns FP32."""
    power = (x.view(torch.int32) & _EXPONENT_MASK).view(torch.float32).clamp_min_(_MIN_NORMAL)
    power.mul_(_ROUNDER)
    # Adding and subtracting loses the sign of zero; E4M3 keeps it.
    return (x + power).sub_(power).copysign_(x)


# Subnormals are handled as integers: libraries built with fast-math switch FP32 subnormals off for
# the whole process, which a shift of the exponent range would run into.


def encode_e4m3(values: Tensor) -> Tensor:
    """Byte codes (uint8) of FP32 `values` that already lie on the E4M3 grid."""
    bits = values.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude >> 20) - _REBIAS
    subnormal = (values.abs() / _MIN_SUBNORMAL).to(torch.int32)
    code = torch.where(values.abs() < _MIN_NORMAL, subnormal, normal)
    return (code | (bits >> 24) & 0x80).to(torch.uint8)


def decode_e4m3(codes: Tensor) -> Tensor:
    """FP32 values of byte `codes` (uint8, or float8_e4m3fn viewed as such). NaN codes are refused."""
    bits = codes.view(torch.uint8).to(torch.int32)
    code = bits & 0x7F
    if bool((code == 0x7F).any()):
        raise ValueError("an E4M3 tensor holds a NaN code (0x7f or 0xff)")
    normal = ((code + _REBIAS) << 20).view(torch.float32)
    magnitude = torch.where(code < 8, code * _MIN_SUBNORMAL, normal)
    return torch.where(bits >= 0x80, -magnitude, magnitude)
