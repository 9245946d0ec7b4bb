"""The policy loss: a pure function of log-probs, advantages, weights and mask."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """loss: scalar with gradient. clipped: number of tokens whose ratio was clipped (detached)."""

    loss: Tensor
    clipped: Tensor


def clipped_policy_loss(
    c: Tensor,
    p: Tensor,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    *,
    tokens: int,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """-(1 / tokens) * sum over response tokens of w * min(r A, clip(r, 1-low, 1+high) A).

    c: log-probs under the weights being trained [B, T]. p: the same before the update, constant.
    r = exp(c - p). advantages: [B], one for each sequence. weights: rollout correction [B, T].
    mask: bool [B, T], response tokens. tokens: response tokens of the whole batch (all micro-batches
    and ranks), so that the sum over micro-batches does not depend on how the batch is split.
    Source: PPO (arXiv 1707.06347) with GRPO's advantages and token mean (DAPO, arXiv 2503.14476).
    """
    ratio = (c - p.detach()).exp()
    advantage = advantages[:, None]
    unclipped = ratio * advantage
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    objective = torch.minimum(unclipped, bounded) * weights.detach()
    # where, not a product: a NaN outside the mask must not reach the sum.
    loss = -torch.where(mask, objective, 0.0).sum() / tokens
    return PolicyLoss(loss, ((bounded < unclipped) & mask).sum().detach())
