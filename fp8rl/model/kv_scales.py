"""KV scales: descales of q, k and v per layer, for one version of the weights."""

import json
import math
from dataclasses import asdict, dataclass

from fp8rl.numerics.formats import E4M3


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
    prompt and response tokens they were calibrated on. source: which tokens those were.
    """

    version: int
    layers: tuple[LayerScales, ...]
    tokens: int
    source: str

    def require_usable(self, *, layers: int, version: int) -> None:
        """Raises KvScalesError for a missing layer, another version, or a scale that is zero,
        negative, NaN, Inf, or the default of 1.0."""
        if self.version != version:
            raise KvScalesError(
                f"KV scales are of weight version {self.version}, the engine holds {version}"
            )
        if len(self.layers) != layers:
            raise KvScalesError(f"KV scales for {len(self.layers)} layers, the model has {layers}")
        for number, layer in enumerate(self.layers):
            for name, scale in asdict(layer).items():
                if not math.isfinite(scale) or scale <= 0:
                    raise KvScalesError(f"layer {number}: {name}_scale is {scale}")
                if scale == 1.0:
                    raise KvScalesError(
                        f"layer {number}: {name}_scale is 1.0, the default of an uncalibrated layer"
                    )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> "KvScales":
        """Reads what `to_json` wrote."""
        values = json.loads(text)
        layers = tuple(LayerScales(**layer) for layer in values.pop("layers"))
        return KvScales(layers=layers, **values)


def descale(amax: float, margin: float) -> float:
    """amax * margin / 448: the largest magnitude seen maps just below E4M3's largest value."""
    return amax * margin / E4M3.max
