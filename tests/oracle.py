"""An independent oracle of the FP8 numerics: the definition written a second time, in NumPy.

It shares no code with fp8rl. An element is rounded by a search for the nearest value in the table of
all finite ones, in float64; a scale is IEEE float32, as the definition says (so the process must not
flush subnormal numbers to zero). Tensors come as arrays of the values they hold; where their dtype
matters (see `scale_of`), `dtype` names it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

F32 = np.float32
Pair = tuple[np.ndarray, np.ndarray]

# mantissa bits, exponent bias, number of finite magnitudes
FORMATS = {"e4m3": (3, 7, 0x7F), "e5m2": (2, 15, 0x7C)}
LARGEST = {
    "float32": (2 - 2.0**-23) * 2.0**127,
    "bfloat16": (2 - 2.0**-7) * 2.0**127,
    "float16": (2 - 2.0**-10) * 2.0**15,
}


def value_of(code: int, element: str = "e4m3") -> float:
    """The value of a byte, from the format's definition."""
    mantissa_bits, bias, _ = FORMATS[element]
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = divmod(code & 0x7F, 2**mantissa_bits)
    fraction = mantissa / 2**mantissa_bits
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


# The code of a magnitude is its place in the table.
TABLES = {
    name: np.array([value_of(code, name) for code in range(finite)])
    for name, (_, _, finite) in FORMATS.items()
}


def finite_codes(element: str = "e4m3") -> np.ndarray:
    """Every code that is neither NaN nor Inf."""
    positive = np.arange(len(TABLES[element]), dtype=np.uint8)
    return np.concatenate([positive, positive | 0x80])


def encode(x: np.ndarray, element: str = "e4m3") -> np.ndarray:
    """Codes of the values nearest to `x`, ties to the even code, saturating."""
    table = TABLES[element]
    magnitude = np.minimum(np.abs(x.astype(np.float64)), table[-1])
    above = np.searchsorted(table, magnitude, side="left")
    below = np.maximum(above - 1, 0)
    up, down = table[above] - magnitude, magnitude - table[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def decode(codes: np.ndarray, element: str = "e4m3") -> np.ndarray:
    """float64 values of codes."""
    magnitude = TABLES[element][codes & 0x7F]
    return np.where(codes & 0x80, -magnitude, magnitude)


def scale_of(amax: np.ndarray, mode: str, element: str, pow2: bool, dtype: str) -> Pair:
    """float32 (scale, descale) of tiles whose largest magnitudes are `amax` (float32)."""
    limit = F32(TABLES[element][-1])
    if mode == "mxfp8":
        product = amax * (F32(1) / limit)
        with np.errstate(divide="ignore"):
            exponent = np.ceil(np.log2(product.astype(np.float64)))
        exponent = np.clip(exponent, -127, 127)
        # At the lowest exponent Transformer Engine multiplies by 1, which makes the tile zeros.
        return F32(2.0 ** np.where(exponent == -127, 0, -exponent)), F32(2.0**exponent)
    with np.errstate(over="ignore", divide="ignore"):
        scale = np.where(amax == 0, F32(1), limit / amax)
    scale[np.isinf(scale)] = F32(LARGEST[dtype if mode == "block" else "float32"])
    if pow2:
        _, exponent = np.frexp(scale)  # scale = m * 2^exponent, 0.5 <= m < 1
        scale = np.ldexp(F32(1), exponent - 1)
    return scale, F32(1) / scale


@dataclass(frozen=True)
class Quantised:
    """A quantised array: codes, and one descale for each tile of `high` x `wide` elements."""

    codes: np.ndarray
    descale: np.ndarray
    high: int
    wide: int
    element: str

    def values(self) -> np.ndarray:
        return decode(self.codes, self.element)

    def exact(self) -> np.ndarray:
        """float64: value times descale, without rounding."""
        return self.values() * spread(self.descale, self).astype(np.float64)

    def dequantised(self) -> np.ndarray:
        """float32: value times descale, rounded once (to Inf where the input was nearly that)."""
        with np.errstate(over="ignore"):
            return self.values().astype(F32) * spread(self.descale, self)


def spread(per_tile: np.ndarray, tiles: Quantised) -> np.ndarray:
    rows, columns = tiles.codes.shape
    return per_tile[np.arange(rows) // tiles.high][:, np.arange(columns) // tiles.wide]


def tile_of(mode: str, what: str, shape: tuple[int, int], axis: int) -> tuple[int, int]:
    """Rows and columns under one scale. what: "weight" or "activation". axis: the one contracted."""
    along = {"block": 128, "mxfp8": 32, "tensor": shape[axis], "channel": shape[axis]}[mode]
    across = 1
    if mode == "tensor":
        across = shape[1 - axis]
    elif mode == "block" and what == "weight":
        across = 128
    return (across, along) if axis == 1 else (along, across)


def quantise(
    x: np.ndarray,
    mode: str,
    what: str,
    *,
    element: str = "e4m3",
    pow2: bool = False,
    axis: int = 1,
    dtype: str = "float32",
) -> Quantised:
    """`x` (float32) quantised for a product that contracts `axis`."""
    x = x.astype(F32)
    high, wide = tile_of(mode, what, x.shape, axis)
    amax = np.abs(x)
    for dim, size in ((0, high), (1, wide)):
        amax = np.maximum.reduceat(amax, np.arange(0, x.shape[dim], size), axis=dim)
    scale, descale = scale_of(amax, mode, element, pow2, dtype)
    tiles = Quantised(np.zeros(x.shape, np.uint8), descale, high, wide, element)
    return Quantised(encode(x * spread(scale, tiles), element), descale, high, wide, element)


def quantise_weight(w: np.ndarray, **options: Any) -> Pair:
    """(codes [N, K], descales) of a weight in 128x128 blocks."""
    result = quantise(w, "block", "weight", **options)
    return result.codes, result.descale


def dequantise_weight(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 [N, K]: the exact product of value and descale."""
    return Quantised(codes, scales, 128, 128, "e4m3").exact()


def round_trip_rows(x: np.ndarray, **options: Any) -> np.ndarray:
    """float64 [T, K]: each row quantised in groups of 128 along K and dequantised exactly."""
    return quantise(x, "block", "activation", **options).exact()


def linear_operands(
    x: np.ndarray,
    weights: Sequence[np.ndarray],
    dy: np.ndarray,
    order: np.ndarray,
    mode: str,
    *,
    hybrid: bool = False,
    pow2: tuple[bool, bool] = (False, False),
    dtype: str = "float32",
) -> dict[str, Pair]:
    """The quantised operands (A, B) of y, dx and dw = A @ B, in float64.

    x [T, K] and dy [T, N] are of `dtype`; weights: float32, one [N_p, K] for each projection. order:
    the fused row of each row of the projections one after the other; dy, y and dw have fused order.
    pow2: of (weights, activations).
    """

    def w_q(part: np.ndarray, axis: int) -> np.ndarray:
        return quantise(part, mode, "weight", axis=axis, pow2=pow2[0]).exact()

    def a_q(part: np.ndarray, axis: int, element: str = "e4m3") -> np.ndarray:
        options = {"element": element, "axis": axis, "pow2": pow2[1], "dtype": dtype}
        return quantise(part, mode, "activation", **options).exact()

    fused = np.argsort(order)  # the row, one projection after the other, of each fused row
    starts = np.cumsum([len(part) for part in weights])[:-1]
    dy_parts = np.split(dy[:, order], starts, axis=1)
    element = "e5m2" if hybrid else "e4m3"
    w_forward = np.concatenate([w_q(part, 1) for part in weights])
    w_backward = np.concatenate([w_q(part, 0) for part in weights])
    dy_along_n = np.concatenate([a_q(part, 1, element) for part in dy_parts], axis=1)
    dy_along_t = np.concatenate([a_q(part, 0, element) for part in dy_parts], axis=1)
    return {
        "y": (a_q(x, 1), w_forward[fused].T),
        "dx": (dy_along_n, w_backward),
        "dw": (dy_along_t[:, fused].T, a_q(x, 0)),
    }
