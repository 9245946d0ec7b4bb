"""How many elements of K and V the FP8 KV cache could not hold, counted where vLLM writes them.

E4M3 with the descale s holds magnitudes up to 448 s; a magnitude of at most 2^-10 s, half of E4M3's
least, is stored as zero. Counts are integers of a fixed order of work: a chunk that is generated
again has the same.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8rl.numerics.formats import E4M3


class KvCounter:
    """Counts on vLLM's `Attention` modules, whose scales are read at each write."""

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers
        self._elements = [0] * len(layers)
        # [layer, k or v, saturated or underflowed]
        self._counts = torch.zeros(len(layers), 2, 2, dtype=torch.int64)
        for number, layer in enumerate(layers):
            layer.impl.do_kv_cache_update = self._hook(number, layer.impl.do_kv_cache_update)

    def _hook(self, number: int, write: Callable[..., None]) -> Callable[..., None]:
        def counted(
            layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
        ) -> None:
            write(layer, key, value, kv_cache, slot_mapping)
            tokens = len(slot_mapping)  # what is padded has no slot
            self._elements[number] += key[:tokens].numel()
            for column, (x, scale) in enumerate(
                ((key[:tokens], layer._k_scale_float), (value[:tokens], layer._v_scale_float))
            ):
                self._counts[number, column] += unheld(x, scale)

        return counted

    def take(self) -> dict[str, list[int]]:
        """What was written since the last call, by layer: elements of K (V has as many), and how many
        of K and of V saturated and underflowed."""
        counts = self._counts.tolist()
        taken = {
            "elements": list(self._elements),
            "k_saturated": [layer[0][0] for layer in counts],
            "v_saturated": [layer[1][0] for layer in counts],
            "k_underflow": [layer[0][1] for layer in counts],
            "v_underflow": [layer[1][1] for layer in counts],
        }
        self._elements = [0] * len(self._layers)
        self._counts.zero_()
        return taken


def unheld(x: Tensor, scale: float) -> Tensor:
    """int64 [2]: BF16 elements of `x` above 448 * scale, and those not zero of at most 2^-10 * scale.

    By bit patterns, which order magnitudes as numbers do, so that the bounds are not rounded up.
    """
    patterns = x.view(torch.int16) & 0x7FFF
    most, least = _pattern(E4M3.max * scale), _pattern(E4M3.min_subnormal / 2 * scale)
    saturated = torch.count_nonzero(patterns > most)
    underflow = torch.count_nonzero(patterns <= least) - torch.count_nonzero(patterns == 0)
    return torch.stack((saturated, underflow))


def _pattern(bound: float) -> int:
    """The pattern of the greatest BF16 number that is not above `bound`."""
    pattern = int(torch.tensor(bound, dtype=torch.float64).float().view(torch.int32)) >> 16
    number = float(torch.tensor(pattern << 16, dtype=torch.int32).view(torch.float32))
    return pattern if number <= bound else pattern - 1
