"""Policy losses: pure functions of log-probs, advantages, weights and mask.

c: log-probs under the weights being trained, p: the same of the old policy, constant; both of the
sampled tokens, [B, T]. r = exp(c - p), its log clamped to +-20 so that no token can make the sum
infinite. Each loss gives a surrogate of every token, to be maximised; `aggregate` makes one number of
them, over denominators that are counted on the whole batch of an update: so the sum over micro-batches
and ranks does not depend on how the batch is split.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8rl.learner.layout import Layout
from fp8rl.learner.logprobs import clamped_log_ratio
from fp8rl.recipe.objective import Aggregation, LossKind, Objective


@dataclass(frozen=True)
class Denominators:
    """Of the whole batch: tokens that are trained on, and sequences with at least one of them."""

    tokens: int
    sequences: int

    @classmethod
    def of(cls, mask: Tensor, layout: Layout | None = None) -> "Denominators":
        """Counted on the bool mask [B, T] of what is trained on, rejected tokens left out."""
        lengths = (layout or Layout.rows(mask)).lengths(mask)
        return cls(int(lengths.sum()), int((lengths > 0).sum()))

    @property
    def empty(self) -> bool:
        """Nothing is trained on: the loss is 0 and has no gradient."""
        return self.tokens == 0


@dataclass(frozen=True)
class Surrogate:
    """Of each token [B, T]. value: to be maximised, with gradient. ratio: raw, before any clipping,
    detached. low, high: bool, where the ratio's lower or upper bound decided. dual: where dual clip
    did."""

    value: Tensor
    ratio: Tensor
    low: Tensor
    high: Tensor
    dual: Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """loss: scalar with gradient. The rest is detached: numbers of tokens that were clipped below,
    above, and by dual clip; sum and maximum of the raw ratio over the tokens of this part. kl: the KL
    term that is in the loss; None where none is."""

    loss: Tensor
    clipped_low: int
    clipped_high: int
    clipped_dual: int
    ratio_sum: float
    ratio_max: float
    kl: float | None = None

    def with_loss(self, loss: Tensor) -> "PolicyLoss":
        """The same with another term in the loss."""
        return replace(self, loss=loss)

    def with_kl(self, term: Tensor) -> "PolicyLoss":
        """The same with a KL term added to the loss, and told by itself."""
        return replace(self, loss=self.loss + term, kl=float(term.detach()))


def _clip(ratio: Tensor, raw: Tensor, advantages: Tensor, options: Objective) -> Surrogate:
    """min(r A, clip(r, 1 - low, 1 + high) A), and with dual clip max of that and dual A where A < 0."""
    unclipped = ratio * advantages
    value = ratio.clamp(1 - options.clip_low, 1 + options.clip_high) * advantages
    clipped = value < unclipped
    value = torch.minimum(unclipped, value)
    negative = advantages < 0
    dual = torch.zeros_like(clipped)
    if options.dual_clip is not None:
        floor = options.dual_clip * advantages
        dual = negative & (floor > value)
        value = torch.where(dual, floor.expand_as(value), value)
    return Surrogate(value, raw, clipped & negative, clipped & ~negative, dual)


def clipped_surrogate(
    c: Tensor, p: Tensor, advantages: Tensor, mask: Tensor, options: Objective, layout: Layout
) -> Surrogate:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) of each token; A [B, T] or [B, 1].

    dual_clip: where A < 0, not below dual_clip A.
    Source: PPO (arXiv 1707.06347); separate bounds: DAPO (arXiv 2503.14476); dual clip:
    arXiv 1912.09729.
    """
    ratio = clamped_log_ratio(c, p.detach(), mask).exp()
    return _clip(ratio, ratio.detach(), advantages, options)


def gspo_surrogate(
    c: Tensor, p: Tensor, advantages: Tensor, mask: Tensor, options: Objective, layout: Layout
) -> Surrogate:
    """As the clipped one, with the sequence's ratio s = exp(mean of c - p over its tokens).

    In the stop-gradient token form s_t = sg(s) exp(c_t - sg(c_t)), so that each token carries its own
    share of the gradient; under sequence_mean_token_mean it is that of the sequence form.
    Source: GSPO (arXiv 2507.18071), equations 7 and 13.
    """
    mean = layout.spread(layout.mean(clamped_log_ratio(c, p.detach(), mask), mask).detach())
    own = torch.where(mask, c - c.detach(), 0.0)
    ratio = mean.exp() * own.exp()
    return _clip(ratio, ratio.detach(), advantages, options)


def cispo_surrogate(
    c: Tensor, p: Tensor, advantages: Tensor, mask: Tensor, options: Objective, layout: Layout
) -> Surrogate:
    """sg(clip(r, 1 - clip_low, 1 + clip_high)) A c: a clipped ratio weights, and every token has a
    gradient. Source: CISPO, in MiniMax-M1 (arXiv 2506.13585)."""
    ratio = clamped_log_ratio(c, p.detach(), mask).detach().exp()
    weight = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    value = weight * advantages * torch.where(mask, c, 0.0)
    none = torch.zeros_like(mask)
    return Surrogate(value, ratio, (ratio < weight) & mask, (ratio > weight) & mask, none)


def reinforce_surrogate(
    c: Tensor, p: Tensor, advantages: Tensor, mask: Tensor, options: Objective, layout: Layout
) -> Surrogate:
    """A c, without a ratio. Source: REINFORCE (Williams, 1992)."""
    ratio = clamped_log_ratio(c, p.detach(), mask).detach().exp()
    none = torch.zeros_like(mask)
    return Surrogate(advantages * torch.where(mask, c, 0.0), ratio, none, none, none)


SURROGATES: dict[LossKind, Callable[..., Surrogate]] = {
    LossKind.CLIPPED: clipped_surrogate,
    LossKind.GSPO: gspo_surrogate,
    LossKind.CISPO: cispo_surrogate,
    LossKind.REINFORCE: reinforce_surrogate,
}


def aggregate(
    values: Tensor,
    mask: Tensor,
    how: Aggregation,
    denominators: Denominators,
    *,
    length: int = 1,
    layout: Layout | None = None,
) -> Tensor:
    """One number of `values` [B, T] over the mask; denominators: of the whole batch, N tokens and S
    sequences.

    token_mean                sum / N
    token_sum                 sum
    sequence_mean_token_mean  sum over sequences of their token mean / S
    sequence_mean_token_sum   sum / S
    constant_length           sum / (S length): Dr. GRPO (arXiv 2503.20783)
    A sequence has to lie in one part of the batch as a whole. 0 where nothing is in the mask.
    """
    # where, not a product: a NaN outside the mask must not reach the sum.
    if how is Aggregation.SEQUENCE_MEAN_TOKEN_MEAN:
        total = (layout or Layout.rows(mask)).mean(values, mask).sum()
    else:
        total = torch.where(mask, values, 0.0).sum()
    tokens, sequences = max(denominators.tokens, 1), max(denominators.sequences, 1)
    match how:
        case Aggregation.TOKEN_MEAN:
            return total / tokens
        case Aggregation.TOKEN_SUM:
            return total
        case Aggregation.CONSTANT_LENGTH:
            return total / (sequences * length)
        case _:
            return total / sequences


def policy_loss(
    c: Tensor,
    p: Tensor,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    options: Objective,
    *,
    denominators: Denominators,
    length: int = 1,
    layout: Layout | None = None,
) -> PolicyLoss:
    """-aggregate(w * surrogate), with the recipe's loss and aggregation (`learner.*`).

    c, p: [B, T], see above. advantages: [N], one for each sequence. weights: rollout correction
    [B, T]. mask: bool [B, T], tokens that are trained on. denominators: of the whole batch of the
    update. length: for constant_length. Nothing outside the mask matters, be it NaN.
    """
    layout = layout or Layout.rows(mask)
    surrogate = SURROGATES[options.loss](c, p, layout.spread(advantages), mask, options, layout)
    weighted = surrogate.value * weights.detach()
    loss = -aggregate(weighted, mask, options.aggregation, denominators, length=length, layout=layout)
    ratio = torch.where(mask, surrogate.ratio, 0.0).double()

    def count(where: Tensor) -> int:
        return int((where & mask).sum())

    return PolicyLoss(
        loss,
        clipped_low=count(surrogate.low),
        clipped_high=count(surrogate.high),
        clipped_dual=count(surrogate.dual),
        ratio_sum=float(ratio.sum()),
        ratio_max=float(ratio.max()),
    )
