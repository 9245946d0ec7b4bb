"""KV scales: descales of q, k and v per layer, for one version of the weights."""

import json
from dataclasses import asdict, dataclass

from fp8rl.numerics.formats import E4M3

# FP32's normal numbers: outside of them an engine would compute with zero, or less exactly, or Inf.
_LEAST, _GREATEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127


class KvScalesError(ValueError):
    """KV scales that must not be used: the text names the layer and the fault."""


@dataclass(frozen=True)
class LayerScales:
    """Descales (stored value = x / scale) of one layer; what vLLM calls q_scale, k_scale, v_scale."""

    q: float
    k: float
    v: float


@dataclass(frozen=True)
class KvScales:
    """Scales of every layer. version: of the weights they were calibrated with. tokens: how many
    prompt and response tokens they were calibrated on. source: which tokens those were. side: who saw
    them, "learner" or "engine". statistic: of their magnitudes, "amax" or "percentile 99.99".
    tokens_available: how many there were to choose from; None: not said.
    """

    version: int
    layers: tuple[LayerScales, ...]
    tokens: int
    source: str
    side: str = "learner"
    statistic: str = "amax"
    tokens_available: int | None = None

    def require_usable(self, *, layers: int, version: int) -> None:
        """Raises KvScalesError for a missing layer, another version, or a scale that is zero (in FP32,
        as engines keep it), negative, NaN, Inf, or the default of 1.0."""
        if self.version != version:
            raise KvScalesError(
                f"KV scales are of weight version {self.version}, the engine holds {version}"
            )
        if len(self.layers) != layers:
            raise KvScalesError(f"KV scales for {len(self.layers)} layers, the model has {layers}")
        for number, layer in enumerate(self.layers):
            for name, scale in asdict(layer).items():
                if not _LEAST <= scale <= _GREATEST:
                    raise KvScalesError(f"layer {number}: {name}_scale is {scale}")
                if scale == 1.0:
                    raise KvScalesError(
                        f"layer {number}: {name}_scale is 1.0, the default of an uncalibrated layer"
                    )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> "KvScales":
        """Reads what `to_json` wrote; raises KvScalesError for anything else."""
        try:
            values = json.loads(text)
            layers = tuple(LayerScales(**layer) for layer in values.pop("layers"))
            return KvScales(layers=layers, **values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise KvScalesError(f"these are not KV scales: {error!r}") from None


def descale(magnitude: float, margin: float) -> float:
    """magnitude * margin / 448: an amax maps just below E4M3's largest value."""
    return magnitude * margin / E4M3.max
