"""KV calibration on the learner: the largest q, k and v that attention sees, per layer."""

import torch
from torch import Tensor

from fp8rl.model.kv_scales import KvScales, KvScalesError, LayerScales, descale


class AmaxObserver:
    """Collects the amax of q, k and v of every layer over the real tokens of many batches.

    It is called from attention, so it sees them after QK-norm and rotary embedding. Padding does not
    count: `valid` says which tokens of the current batch are real.
    """

    def __init__(self) -> None:
        self.valid_SB: Tensor = torch.ones(0, 0, dtype=torch.bool)
        self._amax: dict[int, Tensor] = {}
        self.tokens = 0

    def start_batch(self, valid_BS: Tensor) -> None:
        """valid_BS: bool [batch, seq], true for tokens that are not padding."""
        self.valid_SB = valid_BS.t()
        self.tokens += int(valid_BS.sum())

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        amax = torch.stack([t.detach()[self.valid_SB].float().abs().amax() for t in (q, k, v)])
        held = self._amax.get(layer)
        self._amax[layer] = amax if held is None else torch.maximum(held, amax)

    def scales(self, *, layers: int, margin: float, version: int, source: str) -> KvScales:
        """Descales amax * margin / 448 of every layer.

        Raises KvScalesError where a layer was not seen or its amax is zero, NaN or Inf.
        """
        missing = [n for n in range(layers) if n not in self._amax]
        if missing:
            raise KvScalesError(f"KV calibration saw nothing of layers {missing}")
        values = tuple(
            LayerScales(*(descale(float(a), margin) for a in self._amax[n])) for n in range(layers)
        )
        scales = KvScales(version, values, self.tokens, source)
        scales.require_usable(layers=layers, version=version)
        return scales
