"""Where vLLM writes K and V to an FP8 cache: what it cannot hold is counted, and the rest is rounded.

E4M3 with the descale s holds magnitudes up to 448 s; a magnitude of at most 2^-10 s, half of E4M3's
least, is stored as zero. Counts are integers of a fixed order of work: a chunk that is generated
again has the same.

On a CPU what goes into the kernel is rounded to nearest first (numerics/kv_cache.py).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8rl.numerics.formats import E4M3
from fp8rl.numerics.kv_cache import for_cpu_kernel

_MAGNITUDE = 0x7FFF


class _Bounds(NamedTuple):
    """Of K and V, [2, 1] each. most, least: the patterns of the greatest BF16 magnitudes that do not
    saturate, and that are stored as zero."""

    scales: tuple[float, float]
    descale: Tensor
    most: Tensor
    least: Tensor


class KvWrites:
    """Hooks on vLLM's `Attention` modules, whose scales are read at each write."""

    def __init__(self, layers: list[Any]) -> None:
        self._elements = [0] * len(layers)
        # [layer, saturated or underflowed, k or v]
        self._counts = torch.zeros(len(layers), 2, 2, dtype=torch.int64)
        for number, layer in enumerate(layers):
            layer.impl.do_kv_cache_update = self._hook(number, layer.impl.do_kv_cache_update)

    def _hook(self, number: int, write: Callable[..., None]) -> Callable[..., None]:
        bounds = bounds_of(1.0, 1.0)

        def hooked(
            layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
        ) -> None:
            nonlocal bounds
            scales = (layer._k_scale_float, layer._v_scale_float)
            if bounds.scales != scales:
                bounds = bounds_of(*scales)
            tokens = len(slot_mapping)  # what is padded has no slot
            kv = torch.stack((key[:tokens], value[:tokens]))
            self._elements[number] += kv[0].numel()
            self._counts[number] += unheld(kv.view(2, -1), bounds)
            if kv.is_cpu:
                key, value = for_cpu_kernel(kv.view(2, -1), bounds.descale).view(kv.shape)
            write(layer, key, value, kv_cache, slot_mapping)

        return hooked

    def take(self) -> dict[str, list[int]]:
        """What was written since the last call, by layer: elements of K (V has as many), and how many
        of K and of V saturated and underflowed."""
        counts = self._counts.tolist()
        taken = {"elements": list(self._elements)}
        for row, what in enumerate(("saturated", "underflow")):
            for column, name in enumerate("kv"):
                taken[f"{name}_{what}"] = [layer[row][column] for layer in counts]
        self._elements = [0] * len(self._elements)
        self._counts.zero_()
        return taken


def bounds_of(k_scale: float, v_scale: float) -> _Bounds:
    """What follows from the descales of K and V."""
    scales = (k_scale, v_scale)

    def patterns(magnitude: float) -> Tensor:
        return torch.tensor([[_pattern(magnitude * scale)] for scale in scales], dtype=torch.int16)

    most, least = patterns(E4M3.max), patterns(E4M3.min_subnormal / 2)
    return _Bounds(scales, torch.tensor(scales, dtype=torch.float32)[:, None], most, least)


def unheld(kv: Tensor, bounds: _Bounds) -> Tensor:
    """int64 [2, 2]: how many elements of K, V (BF16 [2, elements]) saturate, and underflow to zero.

    By bit patterns, which order magnitudes as numbers do, so that the bounds are not rounded up.
    """
    patterns = kv.view(torch.int16) & _MAGNITUDE
    saturated = torch.count_nonzero(patterns > bounds.most, 1)
    underflow = torch.count_nonzero((patterns <= bounds.least) & (patterns != 0), 1)
    return torch.stack((saturated, underflow))


def _pattern(bound: float) -> int:
    """The pattern of the greatest BF16 number that is not above `bound`."""
    pattern = int(torch.tensor(bound, dtype=torch.float64).float().view(torch.int32)) >> 16
    number = float(torch.tensor(pattern << 16, dtype=torch.int32).view(torch.float32))
    return pattern if number <= bound else pattern - 1
