"""What becomes of samples whose rollout log-probs are missing or not finite.

Never 0.0, which would be a probability of 1. The rule is the recipe's (`correction.invalid`); whatever
it is, such samples and tokens are counted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rl.recipe.objective import InvalidLogprobs


class LogprobError(ValueError):
    """A sampled token without a finite rollout log-prob."""


@dataclass(frozen=True)
class Validity:
    """kept: bool [B], samples that are trained on. neutral: bool [B], those of them that are trained
    on with the learner's log-probs in place of the rollout's, so that all ratios are 1. tokens:
    response tokens whose rollout log-prob is not finite. samples: samples with one of them."""

    kept: Tensor
    neutral: Tensor
    tokens: int
    samples: int


def judge(g: Tensor, mask: Tensor, rule: InvalidLogprobs) -> Validity:
    """Applies `rule` to rollout log-probs g [B, T]; mask: bool [B, T], response tokens.

    A missing log-prob is NaN here. One bad token decides for its whole sample: the rest of it is not
    believed either. Raises LogprobError where the rule is `error` and there is one.
    """
    bad = ~torch.isfinite(g) & mask
    rows = bad.any(1)
    tokens, samples = int(bad.sum()), int(rows.sum())
    if samples and rule is InvalidLogprobs.ERROR:
        named = rows.nonzero()[:, 0].tolist()
        raise LogprobError(f"{tokens} rollout log-probs are not finite, in samples {named[:10]}")
    none = torch.zeros_like(rows)
    if rule is InvalidLogprobs.NEUTRAL:
        return Validity(~none, rows, tokens, samples)
    return Validity(~rows, none, tokens, samples)
