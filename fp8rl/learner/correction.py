"""Rollout correction: weights and rejection for samples that another precision has drawn.

g: rollout log-prob, p: learner log-prob under the weights that drew the sample, both of the sampled
token; l = p - g. The weight w = exp(l) re-weights the loss to the learner's own distribution.
Everything here is constant: nothing carries a gradient.

Order: weights and rejection look at the raw ratios of all response tokens, so the order of rules does
not matter and a token that one rule rejects still counts in its sequence's sum. Normalisation comes
last, over what is kept.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8rl.learner.layout import Layout
from fp8rl.learner.logprobs import LOG_RATIO_CLAMP, clamped_log_ratio
from fp8rl.mismatch import k3
from fp8rl.recipe.objective import Bound, Correction, CorrectionMode, Estimator, Level, Rejection


@dataclass(frozen=True)
class Corrected:
    """weights: [B, T], 0 outside `mask`. mask: bool [B, T], response tokens that are trained on; the
    denominators of the loss are counted on it. metrics: by name, over the whole batch given."""

    weights: Tensor
    mask: Tensor
    metrics: dict[str, float]


def log_ratios(p: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: p - g clamped to +-20; 0 outside the mask, where either may hold anything."""
    return clamped_log_ratio(p.detach(), g.detach(), mask)


def raw_weights(
    log_ratio: Tensor, mask: Tensor, mode: CorrectionMode, layout: Layout | None = None
) -> Tensor:
    """[B, T] weights before any bound, from `log_ratios` [B, T].

    token: exp(l). sequence: exp(sum of l over the response), the sum clamped to +-20 too, so that it
    stays finite. geometric: exp(mean of l). off: 1. A sequence's weight stands at each of its tokens.
    Source: token and sequence, rollout correction in veRL; design of this project for clamping.
    """
    if mode is CorrectionMode.OFF:
        return torch.ones_like(log_ratio)
    if mode is CorrectionMode.TOKEN:
        return log_ratio.exp()
    layout = layout or Layout.rows(mask)
    combine = layout.sum if mode is CorrectionMode.SEQUENCE else layout.mean
    combined = combine(log_ratio.double(), mask).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return layout.spread(combined.exp().to(log_ratio.dtype)).expand_as(log_ratio)


def limits(correction: Correction) -> tuple[float, float]:
    """(low, high) beyond which a weight is bounded; low is 0 where there is none."""
    if correction.bound is Bound.ICEPOP:
        return correction.icepop
    return correction.truncate_low or 0.0, correction.truncate


def bounded(weights: Tensor, correction: Correction) -> Tensor:
    """Weights within their bounds.

    truncate: min(w, truncate), and max with truncate_low where given. Truncated importance sampling:
    FlashRL, and FP8-RL (arXiv 2601.18150) with truncate = 2.
    icepop: w within [low, high], else 0. The token stays in the mask and so in the denominator of the
    loss. Source: IcePop (Ling team, 2025).
    """
    low, high = limits(correction)
    if correction.bound is Bound.ICEPOP:
        return torch.where((weights >= low) & (weights <= high), weights, 0.0)
    return weights.clamp(min=correction.truncate_low, max=high)


def importance_weights(
    p: Tensor, g: Tensor, mask: Tensor, correction: Correction, layout: Layout | None = None
) -> Tensor:
    """Bounded weights [B, T] for log-probs p, g [B, T]; ones where the mode is off.

    Each depends on its own sequence only, so that they may be made for any part of a batch.
    """
    if correction.mode is CorrectionMode.OFF:
        return torch.ones_like(p)
    return bounded(raw_weights(log_ratios(p, g, mask), mask, correction.mode, layout), correction)


def estimate(log_ratio: Tensor, by: Estimator) -> Tensor:
    """k1 = -l, k2 = l^2 / 2, k3 = exp(l) - 1 - l: estimators of KL(rollout || learner) for l = p - g.

    Source: Schulman, "Approximating KL divergence" (2020).
    """
    match by:
        case Estimator.K1:
            return -log_ratio
        case Estimator.K2:
            return log_ratio.square() / 2
        case Estimator.K3:
            return k3(log_ratio)


def keeps(log_ratio: Tensor, mask: Tensor, rule: Rejection, layout: Layout | None = None) -> Tensor:
    """bool [B, T]: tokens in the mask that `rule` keeps; what is NaN is not kept.

    log_ratio: [B, T], of `log_ratios`. k1 compares the ratio itself, exp(l) or exp of the sum or mean
    of l, with [low, high], both included: a ratio below `low` is too small for the learner, not for the
    rollout. k2 and k3 compare the estimator (token, or sum, mean or maximum over the response) with
    `high`. At a sequence level all tokens of a sequence are kept, or none.
    """
    layout = layout or Layout.rows(mask)
    values = log_ratio.double() if rule.by is Estimator.K1 else estimate(log_ratio.double(), rule.by)
    if rule.level is not Level.TOKEN:
        combine = {
            Level.SEQUENCE_SUM: layout.sum,
            Level.SEQUENCE_MEAN: layout.mean,
            Level.SEQUENCE_MAX: layout.max,
        }[rule.level]
        values = layout.spread(combine(values, mask))
    if rule.by is Estimator.K1:
        low = 1 / rule.high if rule.low is None else rule.low
        inside = (values >= math.log(low)) & (values <= math.log(rule.high))
    else:
        inside = values <= rule.high
    return inside & mask


def correct(
    p: Tensor, g: Tensor, mask: Tensor, correction: Correction, layout: Layout | None = None
) -> Corrected:
    """Weights, mask and metrics of a whole batch: p, g [B, T], mask bool [B, T] of response tokens.

    Metrics: kept_tokens, kept_sequences (shares of the batch); rejected_<level>_<by> (share of the
    tokens that each rule rejects by itself); share_above, share_below (tokens whose raw weight is
    beyond the bounds); weight_mean, _min, _max, _std, _ess (of the weights applied, over the tokens
    that are kept; raw ratios are in the mismatch panel); normaliser (the mean that weights were divided
    by, else 1). Shares of nothing are 0, and there are no weight_* of nothing.
    """
    layout = layout or Layout.rows(mask)
    log_ratio = log_ratios(p, g, mask)
    raw = raw_weights(log_ratio, mask, correction.mode, layout)
    off = correction.mode is CorrectionMode.OFF
    weights = raw if off else bounded(raw, correction)
    total = max(int(mask.sum()), 1)
    metrics: dict[str, float] = {}
    kept = mask
    for rule in correction.reject:
        passed = keeps(log_ratio, mask, rule, layout)
        metrics[f"rejected_{rule.level}_{rule.by}"] = (
            1 - int(passed.sum()) / total if mask.any() else 0.0
        )
        kept = kept & passed
    normaliser = 1.0
    if correction.normalise and not off:
        normaliser = _mean_weight(weights, kept, correction.mode, layout) or 1.0
        weights = weights / normaliser
    weights = torch.where(kept, weights, 0.0)
    low, high = limits(correction)
    metrics |= {
        "kept_tokens": int(kept.sum()) / total,
        "kept_sequences": int((layout.lengths(kept) > 0).sum())
        / max(int((layout.lengths(mask) > 0).sum()), 1),
        "share_above": 0.0 if off else int(((raw > high) & mask).sum()) / total,
        "share_below": 0.0 if off else int(((raw < low) & mask).sum()) / total,
        "normaliser": normaliser,
    }
    if bool(kept.any()):
        applied = weights[kept].double()
        mean = float(applied.mean())
        metrics |= {
            "weight_mean": mean,
            "weight_min": float(applied.min()),
            "weight_max": float(applied.max()),
            "weight_std": float(applied.std(correction=0)),
            "weight_ess": mean**2 / float(applied.square().mean()) if mean else 0.0,
        }
    return Corrected(weights, kept, metrics)


def _mean_weight(weights: Tensor, kept: Tensor, mode: CorrectionMode, layout: Layout) -> float:
    """Over tokens, or over sequences where a weight is a sequence's; 0 of nothing."""
    if not bool(kept.any()):
        return 0.0
    if mode is CorrectionMode.TOKEN:
        return float(weights[kept].double().mean())
    per_sequence = layout.mean(weights.double(), kept)
    return float(per_sequence[layout.lengths(kept) > 0].mean())
