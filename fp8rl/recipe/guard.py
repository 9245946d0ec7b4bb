"""The recipe's guard: thresholds on an iteration's own figures, and what is done where one is passed.

The rules are judged in the train step, after the backward pass and before the optimiser's step
(fp8rl/guard.py); docs/guard.md says what follows.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from fp8rl.recipe.base import PositiveFloat, PositiveInt, Section


class Watched(StrEnum):
    """What a rule watches."""

    MISMATCH = "mismatch"  # mean exp|g - p| over the tokens; 1 is perfect
    SEQUENCE_MISMATCH = "sequence_mismatch"  # its mean over the worst sequence
    KL = "kl"  # KL(rollout || learner), k3
    ESS = "ess"  # effective sample size of the raw ratios, 0 to 1
    NAN_SHARE = "nan_share"  # response tokens with a log-prob that is NaN or infinite
    REFERENCE_KL = "reference_kl"  # KL(policy || reference), k3
    MASKED_SHARE = "masked_share"  # response tokens that are not trained on
    ENTROPY = "entropy"  # of the policy, nats
    GRAD_NORM = "grad_norm"  # before clipping


METRIC_OF = {
    Watched.MISMATCH: "mismatch/token_mult_prob_error",
    Watched.SEQUENCE_MISMATCH: "mismatch/sequence_mult_prob_error_max",
    Watched.KL: "mismatch/kl_k3",
    Watched.ESS: "mismatch/ess",
    Watched.NAN_SHARE: "mismatch/nan_share",
    Watched.REFERENCE_KL: "train/reference_kl",
    Watched.MASKED_SHARE: "train/masked_share",
    Watched.ENTROPY: "train/entropy",
    Watched.GRAD_NORM: "train/grad_norm",
}


class Action(StrEnum):
    """What a rule does when it fires. Those further down do not include those above them."""

    WARN = "warn"  # say so; every firing is said anyhow
    MASK = "mask"  # do not train on the sequences beyond the threshold (sequence_mismatch)
    ROLLOUT_BF16 = "rollout_bf16"  # the next rollouts in BF16, and back
    SKIP_UPDATE = "skip_update"  # leave the weights as they are
    PAUSE = "pause"  # skip the update, and wait for a person before the next iteration
    STOP = "stop"  # skip the update, and end the run before the next iteration


# Weights trained on a batch that stops the run could not be taken back; a batch left out can.
SKIPPING = frozenset({Action.SKIP_UPDATE, Action.PAUSE, Action.STOP})


class GuardRule(Section):
    """One threshold. It is passed in an iteration whose figure is above `above` or below `below`, and
    fires once that was so in `breaches` of the last `of` iterations. A figure that is NaN, infinite or
    missing passes every rule's threshold, and all of them fire at once."""

    watch: Watched
    """The figure."""
    above: float | None = None
    """It is passed above this. Empty: no upper threshold."""
    below: float | None = None
    """It is passed below this. Empty: no lower threshold."""
    breaches: PositiveInt = 1
    """It fires once so many of the last `of` iterations have passed it."""
    of: PositiveInt = 1
    """Iterations that breaches are counted in."""
    actions: Annotated[tuple[Action, ...], Field(min_length=1)] = (Action.WARN,)
    """What is done then."""

    @property
    def name(self) -> str:
        """Its threshold in words, which tells the rules of a recipe apart."""
        parts = [f"> {self.above:g}"] if self.above is not None else []
        parts += [f"< {self.below:g}"] if self.below is not None else []
        return f"{self.watch} {' or '.join(parts)}"


_USUAL = (
    GuardRule(watch=Watched.MISMATCH, above=1.05, breaches=3, of=5),
    GuardRule(watch=Watched.KL, above=0.1),
    GuardRule(watch=Watched.ESS, below=0.3),
    GuardRule(watch=Watched.NAN_SHARE, above=0.0),
    GuardRule(watch=Watched.MASKED_SHARE, above=0.5),
)


class Guard(Section):
    """Acts on a mismatch instead of only plotting it."""

    rules: tuple[GuardRule, ...] = _USUAL
    """For example [{watch: mismatch, above: 1.2, breaches: 2, of: 3, actions: [rollout_bf16]}]. Empty:
    no guard. By default it warns only."""
    bf16_iterations: PositiveInt = 1
    """Rollouts in BF16 after a firing of rollout_bf16, before the recipe's precision comes back."""
    pause_timeout_s: PositiveFloat = 86400.0
    """A pause that nobody ends stops the run, to be resumed."""

    def has(self, action: Action) -> bool:
        """Whether a rule can do `action`."""
        return any(action in rule.actions for rule in self.rules)

    @property
    def window(self) -> int:
        """Iterations before the current one that a rule may look back on."""
        return max((rule.of for rule in self.rules), default=1) - 1


def guard_problems(guard: Guard, *, has_reference: bool) -> Iterator[tuple[tuple[str, ...], str]]:
    """Recipe keys at fault, and why, and what to do; `rules.py` asks. has_reference: whether the KL to
    a reference policy is measured."""
    key = ("guard.rules",)
    seen = set()
    for rule in guard.rules:
        if rule.above is None and rule.below is None:
            yield key, f"a rule on {rule.watch} has no threshold. Give it above, below, or both"
            continue
        if rule.name in seen:
            yield key, f"{rule.name} stands there twice. Give one rule both actions"
        seen.add(rule.name)
        if rule.watch is Watched.REFERENCE_KL and not has_reference:
            yield (
                (*key, "learner.kl.use"),
                f"{rule.name}: there is no reference policy. Set learner.kl.use (with "
                "learner.kl.beta=0 the KL is measured only)",
            )
        if rule.breaches > rule.of:
            yield key, f"{rule.name}: {rule.breaches} breaches of {rule.of} iterations cannot be"
        if None not in (rule.above, rule.below) and rule.below >= rule.above:  # type: ignore[operator]
            yield key, f"{rule.name}: every value passes it. Make below smaller than above"
        if Action.MASK in rule.actions and (
            rule.watch is not Watched.SEQUENCE_MISMATCH or rule.above is None
        ):
            yield (
                key,
                f"{rule.name}: mask takes out the sequences above a threshold of their own. Set "
                "watch=sequence_mismatch and above, or another action",
            )
