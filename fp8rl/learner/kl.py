"""KL divergence of the policy from a reference, estimated on sampled tokens.

c: log-prob under the policy, ref: under the reference, of tokens that the policy drew. The estimators
agree with KL(policy || reference) in expectation (k2 only near 0), but their gradients do not: that of
k1 is zero in expectation, and that of k3 belongs to KL(reference || policy). So value and gradient are
taken apart here.
"""

import torch
from torch import Tensor

from fp8rl.learner.correction import estimate
from fp8rl.learner.logprobs import LOG_RATIO_CLAMP
from fp8rl.recipe.objective import Estimator


def kl_values(c: Tensor, ref: Tensor, by: Estimator) -> Tensor:
    """[B, T] estimates without gradient, from l = ref - c clamped to +-20.

    k1 = -l, k2 = l^2 / 2, k3 = exp(l) - 1 - l.
    """
    return estimate((ref - c).detach().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP), by)


def kl_penalty(c: Tensor, ref: Tensor, mask: Tensor, by: Estimator) -> Tensor:
    """[B, T] for the loss: the value of `by`, the gradient of k2, whichever `by` is; 0 off the mask.

    The gradient (c - ref) dc is that of KL(policy || reference) in expectation over tokens that the
    policy draws; for samples of another policy weight it with the importance ratio.
    Source: Schulman (2020) for values; Tang and Munos, arXiv 2506.09477, for gradients.
    """
    k2 = torch.where(mask, c - ref.detach(), 0.0).square() / 2
    return torch.where(mask, kl_values(c, ref, by), 0.0) + (k2 - k2.detach())


def rewards_with_kl(
    rewards: Tensor, c: Tensor, ref: Tensor, mask: Tensor, *, beta: float, by: Estimator
) -> Tensor:
    """[B] rewards less beta times the KL estimate summed over each response; constant.

    With k1 its policy gradient is that of the KL. mask: bool [B, T]; one sequence in a row.
    """
    penalty = torch.where(mask, kl_values(c, ref, by), 0.0).sum(1)
    return rewards - beta * penalty.to(rewards.dtype)
