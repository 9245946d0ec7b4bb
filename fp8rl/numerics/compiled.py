"""The quantiser as one compiled pass over a CPU tensor.

The definition is `quantise.define`; this computes the same bits (the tests compare them over every
mode, shape, dtype and edge case) in one pass instead of ten, which is what makes emulated FP8
livable: the plain version spends most of its time moving intermediate tensors.

Compiled by numba on first use, and cached on disk beside this file. Large tensors are cut among
Python threads (numba lets go of the interpreter lock); an OpenMP pool beside torch's own would fight
with it over the cores.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload
from torch import Tensor

from fp8rl.numerics.elements import rebias, rounder
from fp8rl.numerics.formats import ScaleRule, Scheme

_EXPONENT = np.int32(0x7F800000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_MANTISSA = np.int32(0x7FFFFF)
_RULES = {ScaleRule.FP32: 0, ScaleRule.POW2: 1, ScaleRule.UE8M0: 2}
# Elements below which a second thread costs more than it brings.
_WORTH_A_THREAD = 1 << 18


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
def _scale(top, rule, constants):
    """(scale, descale) of a tile whose largest magnitude has FP32 bits `top`."""
    limit, largest = constants[0], constants[3]
    if rule == 2:
        bits = _bits_of(_float_of(top) * (np.float32(1.0) / limit))
        exponent, mantissa = bits >> 23, bits & _MANTISSA
        if mantissa > 0 and not (exponent == 0 and mantissa <= 0x400000):
            exponent += np.int32(1)
        if exponent == 0:
            return np.float32(1.0), np.float32(2.0**-127)
        return _float_of((np.int32(254) - exponent) << 23), _float_of(exponent << 23)
    scale = np.float32(1.0)
    if top != 0:
        scale = limit / _float_of(top)
        if np.isinf(scale):
            scale = largest
    if rule == 1:
        scale = _float_of(_bits_of(scale) & _EXPONENT)
    return scale, np.float32(1.0) / scale


@njit(inline="always", error_model="numpy")
def _on_grid(value, scale, constants):
    """`value * scale` on the element's grid, as `elements.round_to` rounds."""
    limit = constants[0]
    scaled = min(max(value * scale, -limit), limit)
    power = max(_float_of(_bits_of(scaled) & _EXPONENT), constants[1]) * constants[2]
    rounded = (scaled + power) - power
    sign = _bits_of(scaled) & ~_MAGNITUDE
    return _float_of((_bits_of(rounded) & _MAGNITUDE) | sign)


def _emit(out, value, descale, shifts, constants):
    """What is stored: FP32 the dequantised value, uint16 the value in BF16, uint8 its code."""


@overload(_emit, inline="always")
def _emit_by_dtype(out, value, descale, shifts, constants):
    if out.dtype is types.float32:
        return lambda out, value, descale, shifts, constants: value * descale
    if out.dtype is types.uint16:
        return lambda out, value, descale, shifts, constants: np.uint16(_bits_of(value) >> 16)

    def code(out, value, descale, shifts, constants):
        bits = _bits_of(value)
        magnitude = bits & _MAGNITUDE
        normal = (magnitude >> shifts[0]) - shifts[1]
        subnormal = np.int32(_float_of(magnitude) * constants[4])
        small = _float_of(magnitude) < constants[1]
        return np.uint8((subnormal if small else normal) | ((bits >> 24) & np.int32(0x80)))

    return code


@njit(nogil=True, cache=True, error_model="numpy")
def _tiles(bits, out, scales, first, last, high, wide, shift, rule, constants, shifts):
    """Tile rows `first` to `last` of a tensor; returns how many of their tiles hold NaN or Inf."""
    rows, columns = bits.shape
    bad = 0
    for i in range(first, last):
        upper, lower = i * high, min((i + 1) * high, rows)
        for j in range(scales.shape[1]):
            start, stop = j * wide, min((j + 1) * wide, columns)
            # Magnitudes of floats are ordered as their bits are, and an integer maximum vectorises;
            # so does a loop over a slice of one row, which numba knows to be contiguous.
            top = np.int32(0)
            for r in range(upper, lower):
                row = bits[r, start:stop]
                for c in range(row.shape[0]):
                    top = max(top, _wide(row[c], shift) & _MAGNITUDE)
            if top >= _EXPONENT:
                bad += 1
            scale, descale = _scale(top, rule, constants)
            scales[i, j] = descale
            for r in range(upper, lower):
                row, written = bits[r, start:stop], out[r, start:stop]
                for c in range(row.shape[0]):
                    value = _on_grid(_float_of(_wide(row[c], shift)), scale, constants)
                    written[c] = _emit(written, value, descale, shifts, constants)
    return bad


@njit(nogil=True, cache=True, error_model="numpy")
def _columns(bits, out, scales, first, last, high, wide, shift, rule, constants, shifts):
    """As `_tiles` for tiles one column wide (`wide` is 1): whole rows at a time, as memory lies."""
    rows, columns = bits.shape
    bad = 0
    scale = np.empty(columns, dtype=np.float32)
    for i in range(first, last):
        top = np.zeros(columns, dtype=np.int32)
        for r in range(i * high, min((i + 1) * high, rows)):
            row = bits[r]
            for c in range(columns):
                top[c] = max(top[c], _wide(row[c], shift) & _MAGNITUDE)
        descale = scales[i]
        for c in range(columns):
            if top[c] >= _EXPONENT:
                bad += 1
            scale[c], descale[c] = _scale(top[c], rule, constants)
        for r in range(i * high, min((i + 1) * high, rows)):
            row, written = bits[r], out[r]
            for c in range(columns):
                value = _on_grid(_float_of(_wide(row[c], shift)), scale[c], constants)
                written[c] = _emit(written, value, descale[c], shifts, constants)
    return bad


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="fp8rl-quantise")


@cache
def _constants(scheme: Scheme, dtype: torch.dtype) -> tuple[Any, ...]:
    """(constants, shifts, rule) of the kernels for a tensor of `dtype`."""
    element = scheme.element
    largest = torch.finfo(dtype if scheme.small_block_dtype else torch.float32).max
    floats = (element.max, element.min_normal, rounder(element), largest, 1 / element.min_subnormal)
    shifts = (23 - element.mantissa_bits, rebias(element))
    return (
        tuple(np.float32(value) for value in floats),
        tuple(np.int32(value) for value in shifts),
        _RULES[scheme.rule],
    )


def quantise(x: Tensor, scheme: Scheme, out: Tensor) -> Tensor | None:
    """Quantises `x` [R, C] on the CPU into `out` [R, C]; returns the descales, FP32.

    `out`, contiguous, says what is wanted: float32 dequantised values, uint16 values in BF16, uint8
    codes. None where `x` holds NaN or Inf: the caller says so by name.
    """
    dtype = x.dtype
    shape = tuple(x.shape)
    scales = torch.empty(scheme.scale_shape(*shape), dtype=torch.float32)
    x = x.contiguous() if dtype in (torch.float32, torch.bfloat16) else x.float().contiguous()
    high, wide = scheme.tile
    if high is None and wide is None:
        x, out, high = x.view(1, -1), out.view(1, -1), 1
    high, wide = high or max(x.shape[0], 1), wide or max(x.shape[1], 1)
    if x.dtype is torch.float32:
        bits, shift = x.view(torch.int32).numpy(), np.int32(0)
    else:
        bits, shift = x.view(torch.uint16).numpy(), np.int32(16)
    constants, shifts, rule = _constants(scheme, dtype)
    kernel = _columns if wide == 1 and x.shape[1] > 1 else _tiles
    arrays = bits, out.numpy(), scales.numpy()
    down = scales.shape[0]

    def part(first: int, last: int) -> int:
        return int(kernel(*arrays, first, last, high, wide, shift, rule, constants, shifts))

    count = min(torch.get_num_threads(), down) if x.numel() >= _WORTH_A_THREAD else 1
    if count == 1:
        bad = part(0, down)
    else:
        cuts = [down * n // count for n in range(count + 1)]
        bad = sum(_threads(count).map(part, cuts[:-1], cuts[1:]))
    return None if bad else scales
