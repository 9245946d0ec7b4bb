"""FP8 element formats and scaling modes: the one place that knows them. Imports without torch.

    mode      weight scales      activation scales   scale                  source
    block     128 x 128 blocks   1 x 128 groups      FP32 or power of two   TE Float8BlockScaling
    tensor    one a tensor       one a tensor        FP32 or power of two   TE Float8CurrentScaling
    channel   one a row          one a row (token)   FP32 or power of two   vLLM's per-channel W8A8
    mxfp8     1 x 32 groups      1 x 32 groups       UE8M0                  TE MXFP8BlockScaling

Every tile lies along the axis that a product contracts: an operand that is contracted along its rows
is quantised in tiles turned by 90 degrees, from the high-precision tensor.
"""

from dataclasses import dataclass
from enum import StrEnum

BLOCK = 128
MX_GROUP = 32


class BackendError(ValueError):
    """A backend that cannot run here, or not in this mode: the text says why and what to do."""


@dataclass(frozen=True)
class Element:
    """An FP8 element format. Its largest finite value is `max`; it saturates there."""

    name: str
    mantissa_bits: int
    exponent_bias: int
    max: float
    first_special: int
    """The first code of a positive value that is not finite."""

    @property
    def min_normal(self) -> float:
        return 2.0 ** (1 - self.exponent_bias)

    @property
    def min_subnormal(self) -> float:
        return 2.0 ** (1 - self.exponent_bias - self.mantissa_bits)


E4M3 = Element("e4m3", 3, 7, 448.0, 0x7F)  # float8_e4m3fn: no infinities
E5M2 = Element("e5m2", 2, 15, 57344.0, 0x7C)


class ScaleRule(StrEnum):
    """How a tile's scale follows from its largest magnitude."""

    FP32 = "fp32"
    POW2 = "pow2"  # the FP32 scale rounded down to a power of two
    UE8M0 = "ue8m0"  # MXFP8: amax / max rounded up to a power of two, kept as its exponent


class Scaling(StrEnum):
    """Which elements share a scale."""

    BLOCK = "block"
    TENSOR = "tensor"
    CHANNEL = "channel"
    MXFP8 = "mxfp8"


Tile = tuple[int | None, int | None]
"""Rows and columns under one scale; None: all there are."""

# (weight, activation) tiles of a tensor that is contracted along its columns.
_TILES: dict[Scaling, tuple[Tile, Tile]] = {
    Scaling.BLOCK: ((BLOCK, BLOCK), (1, BLOCK)),
    Scaling.TENSOR: ((None, None), (None, None)),
    Scaling.CHANNEL: ((1, None), (1, None)),
    Scaling.MXFP8: ((1, MX_GROUP), (1, MX_GROUP)),
}


@dataclass(frozen=True)
class Scheme:
    """How one tensor is quantised: element format, tile, scale rule.

    small_block_dtype: where 448 / amax overflows, the scale is the largest finite value of the
    input's own dtype (TE's block kernels) rather than FP32's (TE's tensor scaling).
    """

    element: Element
    tile: Tile
    rule: ScaleRule
    small_block_dtype: bool = False

    def turned(self) -> "Scheme":
        """The same scheme for a tensor that is contracted along its rows."""
        rows, columns = self.tile
        return Scheme(self.element, (columns, rows), self.rule, self.small_block_dtype)

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scales of a [rows, columns] tensor."""
        high, wide = self.tile
        return -(-rows // (high or rows or 1)), -(-columns // (wide or columns or 1))


def _scheme(scaling: Scaling, tile: Tile, element: Element, rule: ScaleRule) -> Scheme:
    if scaling is Scaling.MXFP8:
        rule = ScaleRule.UE8M0
    return Scheme(element, tile, rule, small_block_dtype=scaling is Scaling.BLOCK)


def weight_scheme(
    scaling: Scaling, element: Element = E4M3, rule: ScaleRule = ScaleRule.FP32
) -> Scheme:
    """The scheme of a weight [N, K] that is contracted along K."""
    return _scheme(scaling, _TILES[scaling][0], element, rule)


def activation_scheme(
    scaling: Scaling, element: Element = E4M3, rule: ScaleRule = ScaleRule.FP32
) -> Scheme:
    """The scheme of an activation or output gradient [T, K] that is contracted along K."""
    return _scheme(scaling, _TILES[scaling][1], element, rule)


@dataclass(frozen=True)
class Fp8Recipe:
    """What the three products of an FP8 linear round to.

    weight: W, along K (forward). input: x, along K. gradient: dy, along N.
    """

    weight: Scheme
    input: Scheme
    gradient: Scheme


def fp8_recipe(
    scaling: Scaling = Scaling.BLOCK,
    *,
    weights: ScaleRule = ScaleRule.FP32,
    activations: ScaleRule = ScaleRule.FP32,
    hybrid: bool = False,
) -> Fp8Recipe:
    """The recipe of a scaling mode. hybrid: E4M3 forward, E5M2 gradients."""
    return Fp8Recipe(
        weight_scheme(scaling, E4M3, weights),
        activation_scheme(scaling, E4M3, activations),
        activation_scheme(scaling, E5M2 if hybrid else E4M3, activations),
    )
