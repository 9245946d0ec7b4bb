"""The block quantiser as one pass on a GPU, in Triton: the bits of `quantise.define`.

`define` moves a tensor through device memory about ten times; this reads it once and writes codes and
descales where scaled_mm wants them: for tiles along the rows (wgrad) the codes lie transposed in
memory, so that the contraction is contiguous there too.

The bits are the definition's because every step is its own: magnitudes are compared as bit patterns,
divisions are IEEE's (div_rn: a plain `/` may be an approximation), rounding is the same sum and
difference, codes are made from integers. infra/gpu_check.py compares them on the card, and
tests/contract/test_scaled_mm.py in Triton's interpreter. Nothing imports this module by itself (see
`ScaledMm.use_triton`), so only those who ask for it need Triton.

Left out: E5M2, and the tensor, channel and MXFP8 modes.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from fp8rl.numerics.elements import rebias, rounder
from fp8rl.numerics.formats import BLOCK, E4M3, ScaleRule, Scheme, Tile
from fp8rl.numerics.quantise import Quantised, define

_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_MIN_NORMAL = tl.constexpr(E4M3.min_normal)
_ROUNDER = tl.constexpr(rounder(E4M3))
_SUBNORMALS = tl.constexpr(1 / E4M3.min_subnormal)
_SHIFT = tl.constexpr(23 - E4M3.mantissa_bits)
_REBIAS = tl.constexpr(rebias(E4M3))

# By tile: the rows and columns that one program takes.
_SHARES: dict[Tile, tuple[int, int]] = {
    (1, BLOCK): (32, BLOCK),
    (BLOCK, 1): (BLOCK, 64),
    (BLOCK, BLOCK): (BLOCK, BLOCK),
}


def covers(scheme: Scheme) -> bool:
    """Whether `quantise` here knows `scheme`."""
    return scheme.element == E4M3 and scheme.tile in _SHARES and scheme.rule is not ScaleRule.UE8M0


@triton.jit
def _kernel(
    x, codes, scale_inv, bad,
    rows, columns, x_row, x_column, code_row, code_column, scale_row, scale_column,
    limit, largest,
    HIGH: tl.constexpr, WIDE: tl.constexpr, TALL: tl.constexpr, BROAD: tl.constexpr,
    POW2: tl.constexpr,
):  # fmt: skip
    """Quantises HIGH x WIDE elements. TALL, BROAD: a tile spans all of these rows, of these columns."""
    down, across = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = down * HIGH + tl.arange(0, HIGH)[:, None]
    column = across * WIDE + tl.arange(0, WIDE)[None, :]
    inside = (row < rows) & (column < columns)
    value = tl.load(x + row * x_row + column * x_column, mask=inside, other=0.0)
    if value.dtype == tl.bfloat16:
        # The upper half of FP32: by bits, so that no conversion can drop subnormals.
        value = value.to(tl.uint16, bitcast=True).to(tl.int32) << 16
        value = value.to(tl.float32, bitcast=True)
    else:
        value = value.to(tl.float32)

    top = value.to(tl.int32, bitcast=True) & _MAGNITUDE
    if TALL:
        top = tl.max(top, axis=0, keep_dims=True)
    if BROAD:
        top = tl.max(top, axis=1, keep_dims=True)
    worst = tl.max(tl.max(top, axis=1), axis=0)
    tl.store(bad, 1, mask=worst >= _INFINITY)

    one = tl.full(top.shape, 1.0, tl.float32)
    scale = tl.math.div_rn(one * limit, top.to(tl.float32, bitcast=True))
    scale = tl.where(scale.to(tl.int32, bitcast=True) == _INFINITY, one * largest, scale)
    scale = tl.where(top == 0, one, scale)  # in place of 448 / 0
    if POW2:
        scale = (scale.to(tl.int32, bitcast=True) & _INFINITY).to(tl.float32, bitcast=True)
    place = tl.zeros_like(top).to(tl.int64)
    there = top >= 0
    if TALL:
        place += down * scale_row
    else:
        place += row * scale_row
        there &= row < rows
    if BROAD:
        place += across * scale_column
    else:
        place += column * scale_column
        there &= column < columns
    tl.store(scale_inv + place, tl.math.div_rn(one, scale), mask=there)

    scaled = tl.minimum(tl.maximum(value * scale, -limit), limit)
    power = (scaled.to(tl.int32, bitcast=True) & _INFINITY).to(tl.float32, bitcast=True)
    power = tl.maximum(power, _MIN_NORMAL) * _ROUNDER
    magnitude = ((scaled + power) - power).to(tl.int32, bitcast=True) & _MAGNITUDE
    small = magnitude.to(tl.float32, bitcast=True)
    code = tl.where(
        small < _MIN_NORMAL, (small * _SUBNORMALS).to(tl.int32), (magnitude >> _SHIFT) - _REBIAS
    )
    sign = (scaled.to(tl.int32, bitcast=True) >> 24) & 0x80
    tl.store(codes + row * code_row + column * code_column, (code | sign).to(tl.uint8), mask=inside)


def quantise(x: Tensor, scheme: Scheme, *, name: str = "tensor") -> Quantised:
    """As `quantise.quantise`, for a scheme that is covered; `x` [R, C] FP32, BF16 or FP16 on CUDA.

    Memory is laid out as scaled_mm wants it: codes [R, C] with the tile's long side contiguous,
    descales of 1x128 tiles column by column. Raises NonFiniteError where `x` holds NaN or Inf,
    ValueError for a scheme that is not covered.
    """
    if not covers(scheme):
        raise ValueError(f"the Triton quantiser does not know {scheme}")
    x = x.detach()
    rows, columns = x.shape
    high, wide = _SHARES[scheme.tile]
    down, across = scheme.scale_shape(rows, columns)
    if scheme.tile == (BLOCK, 1):
        codes = torch.empty((columns, rows), dtype=torch.uint8, device=x.device).t()
    else:
        codes = torch.empty((rows, columns), dtype=torch.uint8, device=x.device)
    if scheme.tile == (1, BLOCK):
        scale_inv = torch.empty((across, down), dtype=torch.float32, device=x.device).t()
    else:
        scale_inv = torch.empty((down, across), dtype=torch.float32, device=x.device)
    bad = torch.zeros(1, dtype=torch.int32, device=x.device)
    _kernel[(triton.cdiv(rows, high), triton.cdiv(columns, wide))](
        x, codes, scale_inv, bad,
        rows, columns, *x.stride(), *codes.stride(), *scale_inv.stride(),
        scheme.element.max, torch.finfo(x.dtype if scheme.small_block_dtype else torch.float32).max,
        HIGH=high, WIDE=wide, TALL=scheme.tile[0] == BLOCK, BROAD=scheme.tile[1] == BLOCK,
        POW2=scheme.rule is ScaleRule.POW2,
        num_warps=8 if scheme.tile == (BLOCK, BLOCK) else 4,
        enable_fp_fusion=False,
    )  # fmt: skip
    if int(bad):
        define(x, scheme, name=name)  # says which values, where
    return Quantised(codes, scale_inv, scheme)
