"""KL divergence of the policy from a reference, estimated on sampled tokens.

c: log-prob under the policy, ref: under the reference, of tokens that the policy drew. The estimators
agree with KL(policy || reference) in expectation (k2 only near 0), but their gradients do not: that of
k1 is zero in expectation, and that of k3 belongs to KL(reference || policy). So value and gradient are
taken apart here.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rl.learner.correction import estimate
from fp8rl.learner.logprobs import LOG_RATIO_CLAMP, clamped_log_ratio
from fp8rl.recipe.objective import Estimator


class ReferenceMissingError(RuntimeError):
    """Training with a KL to the reference policy, which was not loaded."""

    def __init__(self, use: str) -> None:
        super().__init__(
            f"learner.kl.use={use} needs the reference policy. Call Learner.load_reference with the "
            "folder of the run's initial weights before training, or set learner.kl.use=off"
        )


@dataclass(frozen=True)
class PriorLogprobs:
    """Log-probs of a batch before its first update, at the rollout's temperature; FP32 [B, T], 0
    outside the response. old: under the weights that drew it, None where no pass of its own is needed
    for them. reference: under the reference policy, None where `learner.kl` is off."""

    old: Tensor | None
    reference: Tensor | None


def kl_values(c: Tensor, ref: Tensor, by: Estimator) -> Tensor:
    """[B, T] estimates without gradient, from l = ref - c clamped to +-20.

    k1 = -l, k2 = l^2 / 2, k3 = exp(l) - 1 - l.
    """
    return estimate((ref - c).detach().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP), by)


def kl_penalty(c: Tensor, ref: Tensor, mask: Tensor, by: Estimator) -> Tensor:
    """[B, T] for the loss: the value of `by`, the gradient of k2, whichever `by` is; 0 off the mask.

    The gradient (c - ref) dc is that of KL(policy || reference) in expectation over tokens that the
    policy draws; for samples of another policy weight it with the importance ratio (`kl_weights`).
    Source: Schulman (2020) for values; Tang and Munos, arXiv 2506.09477, for gradients.
    """
    k2 = torch.where(mask, c - ref.detach(), 0.0).square() / 2
    return torch.where(mask, kl_values(c, ref, by), 0.0) + (k2 - k2.detach())


def kl_weights(weights: Tensor, c: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """[B, T], constant: `weights` times exp(c - old), its log clamped to +-20; `weights` off the mask.

    The importance ratio of the policy being trained over the one that drew the sample, where `weights`
    are those of `old` over that one, truncated or not. With it the mean over tokens of g has the
    gradient of the KL under the policy's own. Source: the unbiased KL of DeepSeek-V3.2
    (arXiv 2512.02556), the ratio taken apart as here.
    """
    return weights.detach() * clamped_log_ratio(c.detach(), old.detach(), mask).exp()


def kl_reward(p: Tensor, ref: Tensor, mask: Tensor, *, beta: float, by: Estimator) -> Tensor:
    """FP64 [B], to be added to the rewards: -beta times the estimate summed over each response.

    Constant. p: log-probs before the first update, ref: of the reference, [B, T]. mask: bool [B, T],
    all response tokens; one sequence in a row. With k1 its policy gradient is that of the KL; a NaN
    stays one.
    """
    return -beta * torch.where(mask, kl_values(p, ref, by).double(), 0.0).sum(1)


def kl_metrics(p: Tensor, ref: Tensor, mask: Tensor) -> dict[str, float]:
    """reference_kl (k3) and reference_kl_k1: means over the mask, in nats, from raw log-ratios in
    float64; none where the mask is empty. A log-prob that is not finite makes both NaN."""
    if not bool(mask.any()):
        return {}
    log_ratio = ref[mask].double() - p[mask].double()
    log_ratio = torch.where(torch.isfinite(log_ratio), log_ratio, math.nan)
    return {
        "reference_kl": float(estimate(log_ratio, Estimator.K3).mean()),
        "reference_kl_k1": float(estimate(log_ratio, Estimator.K1).mean()),
    }
