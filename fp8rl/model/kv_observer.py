"""What KV calibration sees of q, k and v: for learner and engine the same observer, exact and bounded.

A magnitude is kept as its bit pattern, which orders magnitudes as numbers do and puts Inf and NaN on
top: so the largest pattern is the amax, also over ranks, and no NaN gets lost in a maximum. BF16 has
2^15 magnitudes, so a count of each (256 KiB for one tensor of a layer) gives every percentile exactly,
however many elements there were. FP32 is rounded up to the next BF16 magnitude for that, 0.8% at most.
"""

import math
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor

from fp8rl.model.kv_scales import KvScales, KvScalesError, LayerScales, descale

_BINS = 1 << 15
_INF = 0x7F80  # BF16's pattern of Inf; NaN is above
_UNSEEN = -1
_NAMES = "qkv"


class KvObserver:
    """Amax of q, k and v of every layer, or a true percentile of their elements' magnitudes.

    layers: of the whole model, also where this process holds some of them. percentile: in (50, 100];
    None: the amax. Called from attention, so it sees them after QK-norm and rotary embedding.
    """

    def __init__(self, layers: int, percentile: float | None = None) -> None:
        self.percentile = percentile
        self.tokens = 0
        self._valid_SB: Tensor | None = None
        # FP32 bit patterns.
        self._amax = torch.full((layers, len(_NAMES)), _UNSEEN, dtype=torch.int32)
        self._counts: Tensor | None = None
        if percentile is not None:
            self._counts = torch.zeros(layers, len(_NAMES), _BINS, dtype=torch.int64)

    def start_batch(self, valid_BS: Tensor) -> None:
        """valid_BS: bool [batch, seq], true for the tokens that are not padding: only they count."""
        self._valid_SB = valid_BS.t()
        self.tokens += int(valid_BS.sum())

    def start_tokens(self, count: int) -> None:
        """What comes next are `count` tokens without padding."""
        self._valid_SB = None
        self.tokens += count

    @torch.no_grad()
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """layer: from 0, over all pipeline stages. q, k, v: [seq, batch, heads, head_dim] after
        `start_batch`, [tokens, heads, head_dim] after `start_tokens`."""
        for column, x in enumerate((q, k, v)):
            x = x.detach() if self._valid_SB is None else x.detach()[self._valid_SB]
            if not x.numel():
                continue
            largest = int(_fp32_patterns(x).max())
            self._amax[layer, column] = max(int(self._amax[layer, column]), largest)
            if self._counts is not None:
                patterns = _bf16_patterns(x).flatten()
                self._counts[layer, column] += torch.bincount(patterns, minlength=_BINS)

    def merge(
        self,
        ranks: dist.ProcessGroup | None = None,
        *,
        data_parallel: dist.ProcessGroup | None = None,
    ) -> None:
        """Joins what `ranks` (None: all) saw, in each of them: the maximum of the amax, the sum of the
        counts. It does not matter whether a rank saw other tokens, other heads or other layers.

        data_parallel: the ranks that saw other tokens (None: all), over which tokens add up.
        """
        dist.all_reduce(self._amax, dist.ReduceOp.MAX, group=ranks)
        if self._counts is not None:
            for layer in self._counts:  # one layer at a time: gloo copies what it sends
                dist.all_reduce(layer, group=ranks)
        tokens = torch.tensor(self.tokens)
        dist.all_reduce(tokens, group=data_parallel)
        self.tokens = int(tokens)

    def magnitude(self, layer: int, name: str) -> float:
        """The amax or percentile of one of "q", "k", "v".

        A percentile p is the smallest magnitude that at least p % of the elements do not exceed.
        Raises KvScalesError where elements were NaN or Inf.
        """
        column = _NAMES.index(name)
        if int(self._amax[layer, column]) >= _INF << 16:
            raise KvScalesError(f"layer {layer}: KV calibration saw {name} that are NaN or Inf")
        if self._counts is None or self.percentile is None:
            return _number(int(self._amax[layer, column]))
        up_to = self._counts[layer, column].cumsum(0)
        rank = math.ceil(Fraction(str(self.percentile)) * int(up_to[-1]) / 100)
        return _number(int(torch.searchsorted(up_to, rank)) << 16)

    def scales(
        self, *, margin: float, version: int, source: str, side: str, tokens_available: int | None
    ) -> KvScales:
        """Descales magnitude * margin / 448 of every layer. The rest: fields of KvScales;
        tokens_available: None where all were seen.

        Raises KvScalesError where a layer was not seen or its magnitude is zero, NaN or Inf.
        """
        missing = [n for n, seen in enumerate(self._amax) if int(seen.min()) == _UNSEEN]
        if missing:
            raise KvScalesError(f"KV calibration saw nothing of layers {missing}")
        layers = len(self._amax)
        values = tuple(
            LayerScales(**{name: descale(self.magnitude(n, name), margin) for name in _NAMES})
            for n in range(layers)
        )
        available = self.tokens if tokens_available is None else tokens_available
        statistic = "amax" if self.percentile is None else f"percentile {self.percentile:g}"
        scales = KvScales(version, values, self.tokens, source, side, statistic, available)
        scales.require_usable(layers=layers, version=version)
        return scales


def _fp32_patterns(x: Tensor) -> Tensor:
    """int32: bit patterns of |x| in FP32."""
    if x.dtype is torch.bfloat16:
        return _bf16_patterns(x).int() << 16
    return x.float().view(torch.int32) & 0x7FFFFFFF


def _bf16_patterns(x: Tensor) -> Tensor:
    """Integers: bit patterns of |x| in BF16; what is not BF16 is rounded up."""
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16) & 0x7FFF
    return ((_fp32_patterns(x).long() + 0xFFFF) >> 16).clamp_(max=_BINS - 1)


def _number(pattern: int) -> float:
    return float(torch.tensor(pattern, dtype=torch.int32).view(torch.float32))
