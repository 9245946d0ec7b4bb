"""The mismatch panel: rollout engine against learner, on the same tokens and the same weights.

g: rollout log-prob, p: learner log-prob, over response tokens. All from raw ratios, before any
truncation, so that a correction cannot hide what it corrects. Computed in float64.
"""

import math

import torch
from torch import Tensor


def _k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - 1 - x: the low-variance, non-negative KL estimator (Schulman, 2020)."""
    return torch.expm1(log_ratio) - log_ratio


def _quantile(values: Tensor, q: float) -> Tensor:
    """Linear between the two nearest, of any number of values (torch's own stops at 2^24)."""
    ordered = values.sort().values  # NaN sorts last
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    between = ordered[low] + (ordered[high] - ordered[low]) * (place - low)
    return torch.where(torch.isnan(ordered[-1]), ordered[-1], between)


def mismatch_panel(g: Tensor, p: Tensor, mask: Tensor, *, truncate: float) -> dict[str, float]:
    """Metrics by name, for log-probs g, p [B, T] and a bool mask [B, T] of response tokens.

    token_mult_prob_error   mean exp(|g - p|); 1 is perfect (NeMo RL). Also _p50, _p99, _max
    kl_k1, kl_k3            estimates of KL(rollout || learner): mean (g - p), mean k3(p - g)
    js_divergence           mean of (k3(p, m) + k3(g, m)) / 2, m the log of the mean probability
    ratio_mean, ratio_max   importance ratio exp(p - g)
    ess                     effective sample size 1 / mean((w / mean w)^2), between 0 and 1
    out_of_bounds           share of tokens whose ratio exceeds `truncate` or is below its inverse
    ppl_difference          mean over sequences of mean g - mean p
    nan_count               response tokens with a NaN or infinite log-prob; they make the rest NaN
    Raises ValueError where the mask is empty.
    """
    tokens = int(mask.sum())
    if tokens == 0:
        raise ValueError("no response token to compare rollout and learner on")
    g_T, p_T = g[mask].double(), p[mask].double()
    finite = torch.isfinite(g_T) & torch.isfinite(p_T)
    difference = torch.where(finite, p_T - g_T, math.nan)
    error = difference.abs().exp()
    ratio = difference.exp()
    log_mean = torch.logaddexp(g_T, p_T) - math.log(2)
    counts = mask.sum(1)
    rows = counts > 0
    per_sequence = torch.where(mask, (g - p).double(), 0.0).sum(1)[rows] / counts[rows]
    js = (_k3(p_T - log_mean) + _k3(g_T - log_mean)) / 2
    panel = {
        "token_mult_prob_error": error.mean(),
        "token_mult_prob_error_p50": _quantile(error, 0.5),
        "token_mult_prob_error_p99": _quantile(error, 0.99),
        "token_mult_prob_error_max": error.max(),
        "kl_k1": -difference.mean(),
        "kl_k3": _k3(difference).mean(),
        "js_divergence": js.mean(),
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "ess": 1 / (ratio / ratio.mean()).square().mean(),
        "out_of_bounds": ((ratio > truncate) | (ratio < 1 / truncate)).double().mean(),
        "ppl_difference": per_sequence.mean(),
        "nan_count": (~finite).double().sum(),
    }
    return {name: float(value) for name, value in panel.items()}
