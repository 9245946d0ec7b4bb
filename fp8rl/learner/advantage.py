"""Advantages of the samples of an iteration, each compared within its group.

rewards: FP64 or FP32 [B]. groups: int64 [B], the id of each sample's group, in any order: groups are
never guessed from positions or prompts. All return [B] in the dtype of the rewards. A group whose
rewards are all equal gets exactly 0, without float noise. A NaN or infinite reward raises ValueError,
and so does a group of one, which has nothing to be compared with.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rl.recipe.objective import AdvantageKind

STD_EPS = 1e-6


@dataclass(frozen=True)
class _Groups:
    """centred: [B], reward less its group's mean, exactly 0 where all of the group are equal. index:
    int64 [B], the group's place in counts. counts: [groups], samples of each, as the rewards' dtype."""

    centred: Tensor
    index: Tensor
    counts: Tensor


def _grouped(rewards: Tensor, groups: Tensor) -> _Groups:
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError("a reward is NaN or Inf")
    _, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    if bool((counts < 2).any()):
        raise ValueError("a group has a single sample: its advantage is not defined")
    n = counts.to(rewards.dtype)
    mean = torch.zeros_like(n).index_add(0, index, rewards) / n
    low = torch.full_like(n, torch.inf).scatter_reduce(0, index, rewards, "amin")
    high = torch.full_like(n, -torch.inf).scatter_reduce(0, index, rewards, "amax")
    flat = (low == high)[index]
    centred = torch.where(flat, torch.zeros_like(rewards), rewards - mean[index])
    return _Groups(centred, index, n)


def grpo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """(R - mean) / (std + 1e-6) within each group, std unbiased.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.
    """
    g = _grouped(rewards, groups)
    squares = torch.zeros_like(g.counts).index_add(0, g.index, g.centred.square())
    std = (squares / (g.counts - 1)).sqrt()
    return g.centred / (std[g.index] + STD_EPS)


def dr_grpo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """R - mean within each group. Source: Dr. GRPO (arXiv 2503.20783)."""
    return _grouped(rewards, groups).centred


def rloo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """R less the mean of the group's other rewards, which is n / (n - 1) (R - mean).

    Source: RLOO (arXiv 2402.14740).
    """
    g = _grouped(rewards, groups)
    return g.centred * (g.counts / (g.counts - 1))[g.index]


def reinforce_plus_plus_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """(R - mean of the group) / (std + 1e-6), std unbiased over all samples of the iteration.

    The second centring of the paper, by the mean over all samples, subtracts an exact 0 (every group is
    centred already) and is left out. Source: REINFORCE++ with baseline (arXiv 2501.03262).
    """
    centred = _grouped(rewards, groups).centred
    std = (centred.square().sum() / (len(centred) - 1)).sqrt()
    return centred / (std + STD_EPS)


_KINDS = {
    AdvantageKind.GRPO: grpo_advantages,
    AdvantageKind.DR_GRPO: dr_grpo_advantages,
    AdvantageKind.RLOO: rloo_advantages,
    AdvantageKind.REINFORCE_PLUS_PLUS: reinforce_plus_plus_advantages,
}


def advantages(kind: AdvantageKind, rewards: Tensor, groups: Tensor) -> Tensor:
    """Those of `kind`."""
    return _KINDS[kind](rewards, groups)
