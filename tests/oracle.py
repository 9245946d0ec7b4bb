"""An independent oracle of block-wise FP8, in NumPy. It shares no code with fp8rl.

Rounding goes through a table of all finite E4M3 values and a search for the nearest, in float64;
scales are IEEE float32, as the format's definition says.
"""

import numpy as np

F32 = np.float32
FINITE_CODES = np.array([c for c in range(256) if c & 0x7F != 0x7F], dtype=np.uint8)


def value_of(code: int) -> float:
    """The value of an E4M3 byte, from the format's definition."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


_MAGNITUDES = np.array([value_of(c) for c in range(0x7F)])  # code c has magnitude _MAGNITUDES[c]


def encode(x: np.ndarray) -> np.ndarray:
    """Codes of the nearest E4M3 values of `x`, ties to the even code, saturating at 448."""
    magnitude = np.minimum(np.abs(x.astype(np.float64)), 448.0)
    above = np.clip(np.searchsorted(_MAGNITUDES, magnitude, side="left"), 0, 0x7E)
    below = np.maximum(above - 1, 0)
    up, down = _MAGNITUDES[above] - magnitude, magnitude - _MAGNITUDES[below]
    even_above = above % 2 == 0
    code = np.where((up < down) | ((up == down) & even_above), above, below)
    return (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def decode(codes: np.ndarray) -> np.ndarray:
    """float64 values of codes."""
    return np.array([value_of(int(c)) for c in codes.ravel()]).reshape(codes.shape)


def scale_of(amax: float, largest: float = float(np.finfo(F32).max), pow2: bool = False) -> np.float32:
    """The float32 scale of a block with largest magnitude `amax`."""
    with np.errstate(over="ignore", divide="ignore"):
        scale = F32(1) if amax == 0 else F32(448) / F32(amax)
    if np.isinf(scale):
        scale = F32(largest)
    if pow2:
        scale = F32(2.0 ** np.floor(np.log2(np.float64(scale))))
    return scale


def quantise_block(block: np.ndarray, **options) -> tuple[np.ndarray, np.float32]:
    """(codes, descale) of one block of float32 values."""
    scale = scale_of(float(np.abs(block).max(initial=0.0)), **options)
    with np.errstate(over="ignore"):
        scaled = block.astype(F32) * scale
    return encode(scaled), F32(1) / scale


def quantise_weight(w: np.ndarray, **options) -> tuple[np.ndarray, np.ndarray]:
    """(codes [N, K], descales) of a weight in 128x128 blocks."""
    n, k = w.shape
    codes = np.zeros((n, k), dtype=np.uint8)
    scales = np.zeros((-(-n // 128), -(-k // 128)), dtype=F32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            tile = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
            codes[tile], scales[i, j] = quantise_block(w[tile], **options)
    return codes, scales


def dequantise_weight(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 [N, K]: the exact product of value and descale."""
    n, k = codes.shape
    full = np.kron(scales.astype(np.float64), np.ones((128, 128)))[:n, :k]
    return decode(codes) * full


def round_trip_rows(x: np.ndarray, **options) -> np.ndarray:
    """float64 [T, K]: each row quantised in groups of 128 along K and dequantised exactly."""
    out = np.zeros(x.shape)
    for t in range(x.shape[0]):
        for j in range(0, x.shape[1], 128):
            codes, scale = quantise_block(x[t, j : j + 128], **options)
            out[t, j : j + 128] = decode(codes) * np.float64(scale)
    return out
