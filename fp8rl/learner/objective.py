"""What an update optimises, as the recipe's `learner` and `correction` choose it.

The pieces are pure functions in their own modules (advantage, correction, loss, validity). Here they
are put together for one iteration's batch: first what needs the batch as a whole (`begin`: validity,
rejection, normalised weights, and so the denominators), then each micro-batch (`loss`), then what is
reported (`metrics`). With the default recipe nothing needs the whole batch but the count of tokens.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8rl.learner.batch import Batch
from fp8rl.learner.correction import correct, importance_weights, limits
from fp8rl.learner.kl import (
    PriorLogprobs,
    ReferenceMissingError,
    kl_metrics,
    kl_penalty,
    kl_reward,
    kl_weights,
)
from fp8rl.learner.loss import Denominators, PolicyLoss, aggregate, policy_loss
from fp8rl.learner.validity import Validity, judge
from fp8rl.mismatch import before_and_after, sequence_errors
from fp8rl.recipe.guard import Action
from fp8rl.recipe.objective import CorrectionMode, KlUse
from fp8rl.recipe.schema import Recipe


@dataclass(frozen=True)
class Plan:
    """What is trained on. candidates: bool [B, T], response tokens of the samples that are valid and
    not left out. mask: those of them that no rule rejects. g: [B, T], as the batch's. neutral: bool
    [B], see `Validity`. weights: [B, T], where they need the whole batch. reference: log-probs under
    the reference policy [B, T]; None where `learner.kl` is off."""

    candidates: Tensor
    mask: Tensor
    g: Tensor
    neutral: Tensor
    weights: Tensor | None
    reference: Tensor | None = None

    def part(self, rows: slice, columns: int) -> "Plan":
        """Some of the sequences, cut to the columns of a micro-batch."""
        return Plan(
            self.candidates[rows, :columns],
            self.mask[rows, :columns],
            self.g[rows, :columns],
            self.neutral[rows],
            None if self.weights is None else self.weights[rows, :columns],
            None if self.reference is None else self.reference[rows, :columns],
        )

    def without(self, rows: Tensor) -> "Plan":
        """The same, with nothing of the sequences `rows` (bool [B]) trained on."""
        return replace(self, mask=self.mask & ~rows[:, None])

    def rollout_logprobs(self, p: Tensor) -> Tensor:
        """[B, T]: g, and for neutral samples the learner's own `p`."""
        return torch.where(self.neutral[:, None], p, self.g)


class PolicyObjective:
    """The objective of `recipe`.

    Decoupled (correction.bypass=false): the loss's ratio is that of the learner to itself before the
    update, exp(c - p), and the weights are those of exp(p - g). Bypass: the old policy is the rollout,
    the loss's ratio is exp(c - g) and the rules ask for mode=off; with loss=reinforce, which has no
    ratio, the weights are those of exp(c - g), constant. Rejection compares p with g in both.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.options = recipe.learner
        self.correction = recipe.correction
        self.length = recipe.learner.aggregation_length or recipe.rollout.max_new_tokens
        self._guard_masks = recipe.guard.has(Action.MASK)

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether p of the whole batch is needed before the first micro-batch is trained on: what is
        rejected or masked decides the denominators, a mean of weights is over all of them, and so is a
        KL that goes into the rewards."""
        whole = self.correction.reject or self.correction.normalise or self._guard_masks
        return bool(whole) or self.options.kl.use is KlUse.REWARD

    @property
    def needs_reference(self) -> bool:
        """Whether the log-probs under the reference policy are needed."""
        return self.options.kl.is_on

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.options.entropy_bonus > 0

    def kl_reward(self, batch: Batch, prior: PriorLogprobs) -> Tensor | None:
        """FP64 [B], what the KL adds to the rewards; None where it is not to be in them."""
        kl = self.options.kl
        if kl.use is not KlUse.REWARD:
            return None
        assert prior.old is not None
        assert prior.reference is not None
        return kl_reward(prior.old, prior.reference, batch.mask, beta=kl.beta, by=kl.by)

    def require_rewards_without_kl(self) -> None:
        """Raises ValueError where the advantages have to be made of rewards with the KL in them."""
        if self.options.kl.use is KlUse.REWARD:
            raise ValueError(
                "learner.kl.use=reward: the advantages depend on log-probs of before the update. Take "
                "them from Learner.prior_logprobs, make the advantages by learning_signal with "
                "PolicyObjective.kl_reward of them, and pass them to train"
            )

    def begin(
        self,
        batch: Batch,
        old: Tensor | None,
        trained: Tensor | None = None,
        reference: Tensor | None = None,
    ) -> Plan:
        """Decides what is trained on. old: p [B, T], given where `needs_old_logprobs`. trained: bool
        [B], false for samples to be left out; None: all. reference: log-probs under the reference
        policy [B, T], given where `needs_reference`.

        Raises LogprobError where the recipe says that an invalid log-prob is an error, and
        ReferenceMissingError.
        """
        if self.needs_reference and reference is None:
            raise ReferenceMissingError(self.options.kl.use)
        validity = self._judge(batch)
        rows = validity.kept if trained is None else validity.kept & trained
        candidates = batch.mask & rows[:, None]
        plan = Plan(candidates, candidates, batch.g, validity.neutral, None, reference)
        if not self.needs_old_logprobs:
            return plan
        assert old is not None
        corrected = correct(old, plan.rollout_logprobs(old), candidates, self.correction)
        weights = corrected.weights if self.correction.normalise else None
        return Plan(candidates, corrected.mask, batch.g, validity.neutral, weights, reference)

    def _judge(self, batch: Batch) -> Validity:
        return judge(batch.g, batch.mask, self.correction.invalid)

    def loss(
        self,
        part: Plan,
        c: Tensor,
        p: Tensor,
        entropy: Tensor,
        advantages: Tensor,
        denominators: Denominators,
    ) -> PolicyLoss:
        """Loss of one micro-batch: c, p, entropy [B, T] of its tokens, advantages [B]. denominators: of
        the whole update."""
        g = part.rollout_logprobs(p)
        old = g if self.correction.bypass else p
        weights = self._weights(part, c, p, g)
        out = policy_loss(
            c,
            old,
            advantages,
            weights,
            part.mask,
            self.options,
            denominators=denominators,
            length=self.length,
        )
        if self.options.kl.use is KlUse.LOSS:
            out = out.with_kl(self._kl_term(part, c, old, weights, denominators))
        if not self.options.entropy_bonus:
            return out
        mean = aggregate(entropy, part.mask, self.options.aggregation, denominators, length=self.length)
        return out.with_loss(out.loss - self.options.entropy_bonus * mean)

    def _weights(self, part: Plan, c: Tensor, p: Tensor, g: Tensor) -> Tensor:
        if part.weights is not None:
            return part.weights
        target = c.detach() if self.correction.bypass else p
        return importance_weights(target, g, part.candidates, self.correction)

    def _kl_term(
        self, part: Plan, c: Tensor, old: Tensor, weights: Tensor, denominators: Denominators
    ) -> Tensor:
        kl, correction = self.options.kl, self.correction
        assert part.reference is not None
        if not (correction.bypass and correction.mode is not CorrectionMode.OFF):
            weights = kl_weights(weights, c, old, part.candidates)  # else they are of c over g already
        return kl.beta * aggregate(
            weights * kl_penalty(c, part.reference, part.mask, kl.by),
            part.mask,
            self.options.aggregation,
            denominators,
            length=self.length,
        )

    @staticmethod
    def _compared(batch: Batch, validity: Validity) -> Tensor:
        return batch.mask & (validity.kept & ~validity.neutral)[:, None]

    def sequence_errors(self, batch: Batch, p: Tensor) -> tuple[Tensor, Tensor]:
        """(bool [B]: sequences of which rollout and learner are compared, float64 [B]: see
        `mismatch.sequence_errors`); p [B, T]."""
        compared = self._compared(batch, self._judge(batch))
        return compared.any(1), sequence_errors(batch.g, p, compared)

    def metrics(self, batch: Batch, plan: Plan, p: Tensor) -> dict[str, float]:
        """mismatch/* and correction/* of the whole batch, and with a reference policy the KL to it of
        what is trained on (train/reference_kl, reference_kl_k1); p [B, T]: before the first update.

        Samples with an invalid rollout log-prob are counted (mismatch/nan_count, invalid_samples) and
        not compared; one of the learner's that is NaN makes the panel NaN.
        """
        validity = self._judge(batch)
        compared = self._compared(batch, validity)
        low, high = limits(self.correction)
        found: dict[str, float] = {"mismatch/invalid_samples": float(validity.samples)}
        if bool(compared.any()):
            panel = before_and_after(
                batch.g, p, compared, plan.mask & compared, truncate=high, low=low or None
            )
            found |= {f"mismatch/{name}": value for name, value in panel.items()}
        count = found.get("mismatch/nan_count", 0.0) + validity.tokens
        tokens = int(batch.mask.sum())
        found["mismatch/nan_count"] = count
        found["mismatch/nan_share"] = count / tokens
        found["train/masked_share"] = 1 - int(plan.mask.sum()) / tokens
        corrected = correct(p, plan.rollout_logprobs(p), plan.candidates, self.correction)
        if plan.reference is not None:
            kl = kl_metrics(p, plan.reference, plan.mask)
            found |= {f"train/{name}": value for name, value in kl.items()}
        return found | {f"correction/{name}": value for name, value in corrected.metrics.items()}


class Tally:
    """Adds up what the micro-batches of an iteration report."""

    def __init__(self) -> None:
        self.low = self.high = self.dual = 0
        self.ratio_sum = 0.0
        self.ratio_max = 0.0
        self.tokens = self.empty = self.updates = 0
        self.kl: float | None = None

    def start(self, denominators: Denominators) -> None:
        """Of each update, once."""
        self.updates += 1
        self.tokens += denominators.tokens
        self.empty += denominators.empty

    def add(self, out: PolicyLoss) -> None:
        """Of each micro-batch."""
        self.low += out.clipped_low
        self.high += out.clipped_high
        self.dual += out.clipped_dual
        self.ratio_sum += out.ratio_sum
        self.ratio_max = max(self.ratio_max, out.ratio_max)
        if out.kl is not None:
            self.kl = (self.kl or 0.0) + out.kl

    def metrics(self) -> dict[str, float]:
        """train/*: shares of the trained tokens that were clipped, raw ratio of the loss, updates that
        had nothing to train on (and were left out), the KL term of the loss (mean over updates)."""
        tokens = max(self.tokens, 1)
        kl = {} if self.kl is None else {"train/kl_loss": self.kl / self.updates}
        return kl | {
            "train/clip_fraction": (self.low + self.high) / tokens,
            "train/clip_low_fraction": self.low / tokens,
            "train/clip_high_fraction": self.high / tokens,
            "train/dual_clip_fraction": self.dual / tokens,
            "train/ratio_mean": self.ratio_sum / tokens,
            "train/ratio_max": self.ratio_max,
            "train/empty_updates": float(self.empty),
        }
