"""Rewards and samples before training: the parts of DAPO (arXiv 2503.14476) that are pure decisions.

Raw rewards are what verifiers gave; shaped ones are what advantages are made of. Both are logged, and
what to sample is decided on raw ones, so that a length penalty cannot make a group look informative.
"""

from enum import StrEnum

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, *, longest: int, buffer: int, penalty: float) -> Tensor:
    """FP64 [B], 0 or negative, to be added to the reward of a response of `lengths` tokens (int64 [B]).

    min(0, -penalty (length - (longest - buffer)) / buffer): 0 up to longest - buffer, -penalty at
    `longest`. buffer 0: no penalty. Raises ValueError unless 0 <= buffer <= longest, and for a response
    that is longer than the longest. Source: DAPO, equation 13.
    """
    if not 0 <= buffer <= longest:
        raise ValueError(f"a buffer of {buffer} tokens does not fit into {longest}")
    if bool((lengths > longest).any()):
        raise ValueError(f"a response of {int(lengths.max())} tokens; the longest has {longest}")
    if buffer == 0:
        return torch.zeros(len(lengths), dtype=torch.float64)
    beyond = (lengths.double() - (longest - buffer)).clamp(min=0)
    return torch.where(beyond > 0, -penalty * beyond / buffer, 0.0)


def overlong_filter(finish_reasons: list[str]) -> Tensor:
    """bool [B], false for a sample that was cut off ("length"): it is not trained on.

    Its reward stays in its group's statistics. Source: DAPO, section 3.4.
    """
    return torch.tensor([reason != "length" for reason in finish_reasons])


def informative(rewards: Tensor, groups: Tensor) -> Tensor:
    """bool [B]: samples of groups whose raw rewards are not all equal; the others have advantage 0.

    rewards: [B], raw. groups: int64 [B], ids in any order. Raises ValueError for a reward that is not
    finite. Source: dynamic sampling, DAPO, equation 11.
    """
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError("a reward is NaN or Inf")
    _, index = torch.unique(groups, return_inverse=True)
    count = int(index.max()) + 1
    low = torch.full((count,), torch.inf, dtype=rewards.dtype).scatter_reduce(0, index, rewards, "amin")
    high = torch.full((count,), -torch.inf, dtype=rewards.dtype)
    high = high.scatter_reduce(0, index, rewards, "amax")
    return (low < high)[index]


class Draw(StrEnum):
    """What dynamic sampling does next."""

    ENOUGH = "enough"
    AGAIN = "again"
    GIVE_UP = "give_up"  # the budget is spent: train on the groups that there are


def next_draw(kept_groups: int, *, wanted: int, drawn: int, budget: int) -> Draw:
    """After `drawn` batches of prompts with `kept_groups` informative groups among them.

    budget: batches of prompts that one iteration may draw.
    """
    if kept_groups >= wanted:
        return Draw.ENOUGH
    return Draw.AGAIN if drawn < budget else Draw.GIVE_UP


def choose_groups(rewards: Tensor, groups: Tensor, wanted: int) -> Tensor:
    """bool [B]: the samples of the first `wanted` informative groups, by ascending id.

    By id, not by place, so that the choice does not depend on the order in which samples came.
    """
    useful = informative(rewards, groups)
    first = torch.unique(groups[useful])[:wanted]
    return torch.isin(groups, first)
