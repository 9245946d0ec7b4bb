"""Advantages of a group of samples."""

import torch
from torch import Tensor

STD_EPS = 1e-6


def grpo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """GRPO: (R - mean) / (std + 1e-6) within each group, std unbiased.

    rewards: FP64 or FP32 [B]. groups: int64 [B], the id of each sample's group, in any order.
    Returns [B]. A group whose rewards are all equal gets exactly 0, without float noise.
    Raises ValueError for a group of one, which has nothing to be compared with.
    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.
    """
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError("a reward is NaN or Inf")
    _, index, counts = torch.unique(groups, return_inverse=True, return_counts=True)
    if bool((counts < 2).any()):
        raise ValueError("a group has a single sample: its advantage is not defined")
    n = counts.to(rewards.dtype)
    zeros = torch.zeros_like(n)
    mean = zeros.index_add(0, index, rewards) / n
    centred = rewards - mean[index]
    std = (zeros.index_add(0, index, centred.square()) / (n - 1)).sqrt()
    low = torch.full_like(n, torch.inf).scatter_reduce(0, index, rewards, "amin")
    high = torch.full_like(n, -torch.inf).scatter_reduce(0, index, rewards, "amax")
    return torch.where(
        (low == high)[index], torch.zeros_like(rewards), centred / (std[index] + STD_EPS)
    )
