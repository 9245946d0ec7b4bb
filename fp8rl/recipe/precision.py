"""The recipe's `precision`: what is in FP8, and how."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from fp8rl.numerics.formats import Scaling
from fp8rl.recipe.base import NonNegativeInt, PositiveInt, Section


class Linear(StrEnum):
    BF16 = "bf16"
    FP8 = "fp8"


class ElementFormat(StrEnum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"  # E4M3 forward, E5M2 gradients


class ScaleKind(StrEnum):
    FP32 = "fp32"
    POW2 = "pow2"  # rounded down to powers of two, so that descales are rounded up


class Fp8Backend(StrEnum):
    AUTO = "auto"
    REFERENCE = "reference"
    AMX = "amx"
    TORCH = "torch"
    TRANSFORMER_ENGINE = "transformer_engine"


class Head(StrEnum):
    BF16 = "bf16"
    FP32 = "fp32"


class KvStatistic(StrEnum):
    AMAX = "amax"
    PERCENTILE = "percentile"


class KvCalibration(StrEnum):
    LEARNER = "learner"
    ENGINE = "engine"


class Scales(Section):
    """Scales of one side. MXFP8 has UE8M0 scales whatever stands here."""

    weights: ScaleKind = ScaleKind.FP32
    """Weights."""
    activations: ScaleKind = ScaleKind.FP32
    """Activations; in the learner output gradients too."""


class Precision(Section):
    rollout: Linear = Linear.BF16
    """Linears of the rollout engine. fp8: W8A8."""
    learner: Linear = Linear.BF16
    """Linears of the learner. fp8: forward, dgrad and wgrad."""
    kv_cache: Linear = Linear.BF16
    """KV cache of the rollout engine. fp8: E4M3, one descale per layer, recalibrated each step."""
    learner_kv: Linear = Linear.BF16
    """K and V in the learner's attention. fp8: rounded as the FP8 KV cache of these weights holds them;
    gradients are those of the rounded values. Needs kv_cache=fp8."""
    head: Head = Head.BF16
    """Output projection, on both sides: BF16 products of BF16 weights, rounded to BF16 logits. fp32:
    FP32 products of the same BF16 weights, and FP32 logits."""
    parity: bool = True
    """Between its linears the learner rounds where the rollout engine rounds, and attends by the
    engine's own kernel: then both come to the same bits. false: as Megatron-core and torch do."""
    kv_margin: Annotated[float, Field(ge=1, le=2)] = 1.05
    """KV descale = amax * margin / 448, or the percentile instead of the amax."""
    kv_calibration: KvCalibration = KvCalibration.LEARNER
    """Where q, k and v are looked at for the KV scales. engine: in vLLM itself, in its own precision,
    by a pass that computes attention in BF16."""
    kv_statistic: KvStatistic = KvStatistic.AMAX
    """What of their magnitudes: the greatest, or a percentile of all elements (more saturate)."""
    kv_percentile: Annotated[float, Field(gt=50, le=100)] = 99.99
    """With kv_statistic=percentile."""
    kv_tokens: PositiveInt | None = None
    """Tokens to look at for one calibration, in whole sequences, at least one of each prompt.
    Empty: all of the iteration."""
    allow_fp8_kv_without_qk_norm: bool = False
    """Say yes to an FP8 KV cache of a model that does not normalise queries and keys."""
    scaling: Scaling = Scaling.BLOCK
    """Which elements of an FP8 linear share a scale, on both sides. block: 128x128 weights, 1x128
    activations. tensor, channel (one a row), mxfp8 (1x32, UE8M0)."""
    learner_format: ElementFormat = ElementFormat.E4M3
    """hybrid: the learner's output gradients in E5M2, all else in E4M3."""
    rollout_scales: Scales = Scales()
    """Scales of the rollout engine, and so of the published weights."""
    learner_scales: Scales = Scales()
    """Scales of the learner's own products."""
    backend: Fp8Backend = Fp8Backend.AUTO
    """What computes the products of FP8 linears. reference: FP32 products of dequantised operands.
    amx: the same products exactly, on the CPU's matrix unit. auto: amx where the CPU has it and a C++
    compiler is there, else reference; what was taken is reported. torch (scaled_mm) and
    transformer_engine are for a GPU, which the learner does not run on yet."""
    first_layers_bf16: NonNegativeInt = 0
    """So many of the first layers stay in BF16."""
    last_layers_bf16: NonNegativeInt = 0
    """So many of the last layers stay in BF16."""
    include: tuple[str, ...] = ()
    """Linears in FP8: names, patterns with `*` and `?`, or `re:` and a regular expression, each for a
    whole name. Empty: all."""
    exclude: tuple[str, ...] = ()
    """Parameters kept in BF16, named as in include; exclude wins."""
