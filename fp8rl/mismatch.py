"""The mismatch panel: rollout engine against learner, on the same tokens and the same weights.

g: rollout log-prob, p: learner log-prob, over response tokens. All from raw ratios, before any
truncation, so that a correction cannot hide what it corrects. Computed in float64.
"""

import math

import torch
from torch import Tensor


def k3(log_ratio: Tensor) -> Tensor:
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


def sequence_errors(g: Tensor, p: Tensor, mask: Tensor) -> Tensor:
    """float64 [B]: mean exp(|g - p|) over the tokens of each sequence; NaN where it has none in the
    mask, or one whose log-probs are not finite. The largest are the samples to look at."""
    difference = p.double() - g.double()
    error = torch.where(torch.isfinite(difference), difference.abs().exp(), math.nan)
    return torch.where(mask, error, 0.0).sum(1) / mask.sum(1)


def mismatch_panel(
    g: Tensor, p: Tensor, mask: Tensor, *, truncate: float, low: float | None = None
) -> dict[str, float]:
    """Metrics by name, for log-probs g, p [B, T] and a bool mask [B, T] of response tokens.

    token_mult_prob_error   mean exp(|g - p|); 1 is perfect (NeMo RL). Also _p50, _p99, _max
    sequence_mult_prob_error_max  the same over the tokens of a sequence, of the worst sequence
    logprob_difference      mean |g - p|
    prob_difference         mean |exp(g) - exp(p)|; veRL: usual below 0.005. Also _max
    kl_k1, kl_k3            estimates of KL(rollout || learner): mean (g - p), mean k3(p - g)
    js_divergence           mean of (k3(p, m) + k3(g, m)) / 2, m the log of the mean probability
    ratio_mean, ratio_max   importance ratio exp(p - g). Also ratio_min
    sequence_log_ratio_min, sequence_log_ratio_max   sum of p - g over a sequence: its exponential is
                            the sequence's ratio, which a long response makes too large to show
    geometric_ratio_min, geometric_ratio_max   exp of the mean of p - g over a sequence
    ess                     effective sample size 1 / mean((w / mean w)^2), between 0 and 1
    out_of_bounds           share of tokens whose ratio exceeds `truncate` or is below `low` (None: the
                            inverse of `truncate`)
    ppl_difference          mean over sequences of mean g - mean p
    nan_count               response tokens with a NaN or infinite log-prob; they make the rest NaN
    Raises ValueError where the mask is empty.
    """
    tokens = int(mask.sum())
    if tokens == 0:
        raise ValueError("no response token to compare rollout and learner on")
    g_T, p_T = g[mask].double(), p[mask].double()
    finite = torch.isfinite(g_T) & torch.isfinite(p_T)
    g_T, p_T = (torch.where(finite, x, math.nan) for x in (g_T, p_T))
    difference = p_T - g_T
    error = difference.abs().exp()
    ratio = difference.exp()
    low = 1 / truncate if low is None else low
    outside = torch.where(finite, ((ratio > truncate) | (ratio < low)).double(), math.nan)
    log_mean = torch.logaddexp(g_T, p_T) - math.log(2)
    counts = mask.sum(1)
    rows = counts > 0
    gap = (g - p).double()
    gap = torch.where(torch.isfinite(gap), gap, math.nan)
    per_sequence = torch.where(mask, gap, 0.0).sum(1)[rows] / counts[rows]
    js = (k3(p_T - log_mean) + k3(g_T - log_mean)) / 2
    probability = (g_T.exp() - p_T.exp()).abs()
    panel = {
        "token_mult_prob_error": error.mean(),
        "token_mult_prob_error_p50": _quantile(error, 0.5),
        "token_mult_prob_error_p99": _quantile(error, 0.99),
        "token_mult_prob_error_max": error.max(),
        "sequence_mult_prob_error_max": sequence_errors(g, p, mask)[rows].max(),
        "logprob_difference": difference.abs().mean(),
        "prob_difference": probability.mean(),
        "prob_difference_max": probability.max(),
        "kl_k1": -difference.mean(),
        "kl_k3": k3(difference).mean(),
        "js_divergence": js.mean(),
        "ratio_mean": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "sequence_log_ratio_min": (-per_sequence * counts[rows]).min(),
        "sequence_log_ratio_max": (-per_sequence * counts[rows]).max(),
        "geometric_ratio_min": (-per_sequence).exp().min(),
        "geometric_ratio_max": (-per_sequence).exp().max(),
        "ess": 1 / (ratio / ratio.mean()).square().mean(),
        "out_of_bounds": outside.mean(),
        "ppl_difference": per_sequence.mean(),
        "nan_count": (~finite).double().sum(),
    }
    return {name: float(value) for name, value in panel.items()}


def before_and_after(
    g: Tensor,
    p: Tensor,
    mask: Tensor,
    kept: Tensor,
    *,
    truncate: float,
    low: float | None = None,
) -> dict[str, float]:
    """The panel over all response tokens (`mask`), and as kept/<name> over those that are trained on.

    kept: bool [B, T], a part of the mask; where it is all of it the panel stands once. Where nothing
    is kept there is no second one; kept_share, which is always there, is then 0.
    """
    panel = mismatch_panel(g, p, mask, truncate=truncate, low=low)
    panel["kept_share"] = int(kept.sum()) / int(mask.sum())
    if bool(kept.any()) and not torch.equal(kept, mask):
        after = mismatch_panel(g, p, kept, truncate=truncate, low=low)
        panel |= {f"kept/{name}": value for name, value in after.items()}
    return panel
