"""Which sequence each token is of: sums over sequences, and back to their tokens.

Every function of the objective takes token tensors [B, T]. A row usually holds one sequence; packed
rows hold several, and then `segments` names the sequence of each token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """segments: int64 [B, T], the sequence of each token (any below `count` where the mask is false);
    None where row b is sequence b. count: number of sequences N."""

    segments: Tensor | None
    count: int

    @classmethod
    def rows(cls, mask: Tensor) -> "Layout":
        """One sequence in each row of `mask` [B, T]."""
        return cls(None, mask.shape[0])

    @classmethod
    def packed(cls, segments: Tensor) -> "Layout":
        """Several in a row; `segments` as above, numbered from 0."""
        return cls(segments, int(segments.max()) + 1)

    def sum(self, values: Tensor, mask: Tensor) -> Tensor:
        """[N] sums of `values` [B, T] over the tokens of each sequence that are in `mask`."""
        kept = torch.where(mask, values, 0.0)
        if self.segments is None:
            return kept.sum(1)
        return kept.new_zeros(self.count).index_add(0, self.segments.flatten(), kept.flatten())

    def lengths(self, mask: Tensor) -> Tensor:
        """int64 [N]: tokens of each sequence that are in `mask`."""
        return self.sum(mask.double(), mask).long()

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """[N] means, as `sum`; 0 for a sequence with no token in the mask."""
        return self.sum(values, mask) / self.lengths(mask).clamp(min=1)

    def max(self, values: Tensor, mask: Tensor) -> Tensor:
        """[N] maxima of values >= 0, as `sum`; NaN where a value is."""
        kept = torch.where(mask, values, 0.0)
        if self.segments is None:
            return kept.amax(1)
        start = kept.new_zeros(self.count)
        return start.scatter_reduce(0, self.segments.flatten(), kept.flatten(), "amax")

    def spread(self, per_sequence: Tensor) -> Tensor:
        """[B, T], or [B, 1] which broadcasts to it: the value of each token's sequence."""
        return per_sequence[:, None] if self.segments is None else per_sequence[self.segments]
