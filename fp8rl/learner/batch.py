"""Padded batches from ragged rollouts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fp8rl.learner.validity import LogprobError, judge
from fp8rl.recipe.objective import InvalidLogprobs


@dataclass(frozen=True)
class Batch:
    """Sequences padded on the right.

    tokens: int64 [B, S]. lengths: int64 [B], prompt and response. mask: bool [B, S-1], true where
    token j+1 is a response token. g: FP32 [B, S-1], rollout log-prob of token j+1, NaN where it is
    missing, 0 outside mask.
    """

    tokens: Tensor
    lengths: Tensor
    mask: Tensor
    g: Tensor

    def rows(self, index: slice) -> "Batch":
        """Some of the sequences, cut to the longest of them."""
        longest = int(self.lengths[index].max())
        return Batch(
            self.tokens[index, :longest],
            self.lengths[index],
            self.mask[index, : longest - 1],
            self.g[index, : longest - 1],
        )

    def split(self, size: int) -> list["Batch"]:
        """Parts of up to `size` sequences, in order, each cut to its longest."""
        count = len(self.lengths)
        return [self.rows(slice(i, min(i + size, count))) for i in range(0, count, size)]

    @property
    def valid(self) -> Tensor:
        """bool [B, S]: tokens that are not padding."""
        return torch.arange(self.tokens.shape[1])[None] < self.lengths[:, None]


def split_evenly(count: int, parts: int) -> list[slice]:
    """`count` rows in order as `parts` slices whose sizes differ by 1 at most; fewer slices where there
    are fewer rows than that, so that none is empty."""
    parts = min(parts, count)
    bounds = [count * part // parts for part in range(parts + 1)]
    return [slice(start, end) for start, end in pairwise(bounds)]


def make_batch(
    prompts: list[list[int]],
    responses: list[list[int]],
    logprobs: Sequence[Sequence[float | None]] | None = None,
    invalid: InvalidLogprobs = InvalidLogprobs.ERROR,
) -> Batch:
    """A batch of prompt + response sequences, token in, token out.

    logprobs: of each response token; None where there are none (g is 0 then). Where their number is
    not that of the tokens, it is not known whose they are: all of the sample are missing.
    Raises ValueError for an empty response, and LogprobError for a missing or non-finite log-prob
    unless `invalid` is another rule, which is then the learner's to apply.
    """
    lengths = torch.tensor([len(a) + len(b) for a, b in zip(prompts, responses, strict=True)])
    longest = int(lengths.max())
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros(len(prompts), longest - 1, dtype=torch.bool)
    g = torch.zeros(len(prompts), longest - 1)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if not response:
            raise ValueError(f"sample {row} has an empty response")
        tokens[row, : lengths[row]] = torch.tensor(prompt + response)
        span = slice(len(prompt) - 1, len(prompt) - 1 + len(response))
        mask[row, span] = True
        if logprobs is None:
            continue
        given = logprobs[row]
        if len(given) == len(response):
            g[row, span] = torch.tensor([math.nan if x is None else x for x in given])
            continue
        g[row, span] = math.nan
        if invalid is InvalidLogprobs.ERROR:
            raise LogprobError(f"sample {row}: {len(given)} log-probs for {len(response)} tokens")
    judge(g, mask, invalid)
    return Batch(tokens, lengths, mask, g)
