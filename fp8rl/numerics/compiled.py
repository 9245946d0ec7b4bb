"""The group quantiser as one compiled pass over a CPU tensor.

The definition is `blockwise.quantise_groups`; this computes the same bits (the tests compare them
over every shape, dtype and edge case) in one pass instead of ten, which is what makes emulated FP8
livable: the plain version spends most of its time moving intermediate tensors.

Compiled by numba on first use, and cached on disk beside this file.
"""

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from fp8rl.numerics.formats import BLOCK, E4M3_MAX

_EXPONENT = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_MAX = np.float32(E4M3_MAX)
_MIN_NORMAL = np.float32(2.0**-6)
_ROUNDER = np.float32(1.5 * 2.0**20)


@intrinsic
def _float_of(typing, bits):
    def code(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), code


@intrinsic
def _bits_of(typing, value):
    def code(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), code


@njit(inline="always")
def _wide(bits, shift):
    """FP32 bits of a stored value: FP32 as it is, BF16 moved to the upper half."""
    return np.int32(bits) << shift


@njit(inline="always", error_model="numpy")
def _scale(top, pow2, largest):
    """The scale of a group whose largest magnitude has FP32 bits `top`."""
    scale = np.float32(1.0)
    if top != 0:
        scale = _MAX / _float_of(top)
        if np.isinf(scale):
            scale = largest
    if pow2:
        scale = _float_of(_bits_of(scale) & _EXPONENT)
    return scale


@njit(inline="always", error_model="numpy")
def _on_grid(value, scale):
    """`value * scale` on the E4M3 grid, as `e4m3.round_to_e4m3` rounds."""
    scaled = min(max(value * scale, -_MAX), _MAX)
    power = max(_float_of(_bits_of(scaled) & _EXPONENT), _MIN_NORMAL) * _ROUNDER
    rounded = (scaled + power) - power
    sign = _bits_of(scaled) & ~_MAGNITUDE
    return _float_of((_bits_of(rounded) & _MAGNITUDE) | sign)


@njit(inline="always", error_model="numpy")
def _row(bits, out, t, shift, pow2, largest):
    """Row t in groups along it; returns whether it holds NaN or Inf."""
    columns = bits.shape[1]
    bad = False
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        # Magnitudes of floats are ordered as their bits are, and an integer maximum vectorises.
        top = np.int32(0)
        for i in range(start, stop):
            top = max(top, _wide(bits[t, i], shift) & _MAGNITUDE)
        if top >= _EXPONENT:
            bad = True
        scale = _scale(top, pow2, largest)
        inverse = np.float32(1.0) / scale
        for i in range(start, stop):
            out[t, i] = _on_grid(_float_of(_wide(bits[t, i], shift)), scale) * inverse
    return bad


@njit(inline="always", error_model="numpy")
def _rows_together(bits, out, block, shift, pow2, largest):
    """The rows of one block in groups down each column; returns whether they hold NaN or Inf."""
    rows, columns = bits.shape
    start, stop = block * BLOCK, min((block + 1) * BLOCK, rows)
    top = np.zeros(columns, dtype=np.int32)
    for t in range(start, stop):
        for i in range(columns):
            top[i] = max(top[i], _wide(bits[t, i], shift) & _MAGNITUDE)
    bad = False
    scale = np.empty(columns, dtype=np.float32)
    inverse = np.empty(columns, dtype=np.float32)
    for i in range(columns):
        if top[i] >= _EXPONENT:
            bad = True
        scale[i] = _scale(top[i], pow2, largest)
        inverse[i] = np.float32(1.0) / scale[i]
    for t in range(start, stop):
        for i in range(columns):
            out[t, i] = _on_grid(_float_of(_wide(bits[t, i], shift)), scale[i]) * inverse[i]
    return bad


@njit(nogil=True, cache=True, error_model="numpy")
def _rows(bits, out, shift, pow2, largest):
    bad = 0
    for t in range(bits.shape[0]):
        if _row(bits, out, t, shift, pow2, largest):
            bad += 1
    return bad


@njit(nogil=True, cache=True, error_model="numpy")
def _columns(bits, out, shift, pow2, largest):
    bad = 0
    for block in range((bits.shape[0] + BLOCK - 1) // BLOCK):
        if _rows_together(bits, out, block, shift, pow2, largest):
            bad += 1
    return bad


def supports(x: Tensor) -> bool:
    """Whether the compiled passes take `x`: FP32 or BF16 on the CPU."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)


def round_trip(x: Tensor, *, along_rows: bool, power_of_two: bool) -> Tensor | None:
    """`x` [T, K], contiguous, in groups of 128 and dequantised again: FP32 [T, K].

    along_rows: groups lie along K, else down the columns, along T. None where `x` holds NaN or Inf;
    the caller says so by name.
    """
    out = torch.empty(x.shape, dtype=torch.float32)
    if x.dtype is torch.float32:
        bits, shift = x.view(torch.int32).numpy(), np.int32(0)
    else:
        bits, shift = x.view(torch.uint16).numpy(), np.int32(16)
    largest = np.float32(torch.finfo(x.dtype).max)
    run = _rows if along_rows else _columns
    return None if run(bits, out.numpy(), shift, power_of_two, largest) else out
