"""The recipe's choices of the objective: advantage, loss, aggregation, rollout correction.

Formulas, and where each is from: docs/objective.md. The defaults are GRPO's advantage, the clipped loss
with token mean, and token-level truncated importance sampling.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from fp8rl.recipe.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class AdvantageKind(StrEnum):
    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    RLOO = "rloo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"


class LossKind(StrEnum):
    CLIPPED = "clipped"
    GSPO = "gspo"
    CISPO = "cispo"
    REINFORCE = "reinforce"


class Aggregation(StrEnum):
    """How the terms of all tokens become one number. Each is over the whole batch of an update."""

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN_TOKEN_MEAN = "sequence_mean_token_mean"
    SEQUENCE_MEAN_TOKEN_SUM = "sequence_mean_token_sum"
    CONSTANT_LENGTH = "constant_length"
    TOKEN_SUM = "token_sum"


class CorrectionMode(StrEnum):
    """Of which log-ratio the weight w is the exponential; l = p - g of each token."""

    OFF = "off"
    TOKEN = "token"  # l
    SEQUENCE = "sequence"  # the sum of l over the response
    GEOMETRIC = "geometric"  # their mean


class Bound(StrEnum):
    TRUNCATE = "truncate"  # w stays within [truncate_low, truncate]
    ICEPOP = "icepop"  # 0 outside the bounds


class Estimator(StrEnum):
    """Of the divergence between rollout and learner, from l = p - g (`Kl`: l = ref - c)."""

    K1 = "k1"  # -l
    K2 = "k2"  # l^2 / 2
    K3 = "k3"  # exp(l) - 1 - l


class Level(StrEnum):
    """What is rejected, and over which tokens of a response the estimator is taken."""

    TOKEN = "token"
    SEQUENCE_SUM = "sequence_sum"
    SEQUENCE_MEAN = "sequence_mean"
    SEQUENCE_MAX = "sequence_max"


class InvalidLogprobs(StrEnum):
    ERROR = "error"  # the step fails
    DROP = "drop"  # the sample is not trained on
    NEUTRAL = "neutral"  # the sample is trained on as if rollout and learner agreed


class Rejection(Section):
    """One rule: what violates its bounds leaves the mask, and the denominators of the loss with it."""

    by: Estimator
    """Which estimator of the divergence is bounded."""
    level: Level
    """Over which tokens it is taken, and what is rejected."""
    high: PositiveFloat
    """k1: largest importance ratio exp(l) that is kept (of the sum or mean of l at sequence level).
    k2, k3: largest value of the estimator that is kept."""
    low: PositiveFloat | None = None
    """k1: smallest importance ratio that is kept. Empty: 1 / high. k2, k3 have none."""


class Correction(Section):
    """Rollout correction: importance weights of learner over rollout log-probs."""

    mode: CorrectionMode = CorrectionMode.TOKEN
    """Of which log-ratio the weights are made."""
    bound: Bound = Bound.TRUNCATE
    """What is done about weights beyond their bounds."""
    truncate: Annotated[float, Field(gt=1)] = 2.0
    """Upper bound of a weight (truncated importance sampling)."""
    truncate_low: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Lower bound of a weight. Empty: none."""
    icepop: tuple[PositiveFloat, PositiveFloat] = (0.5, 5.0)
    """With bound=icepop: a weight outside these becomes 0; its token stays in the denominator."""
    reject: tuple[Rejection, ...] = ()
    """What is not trained on; of several rules all must hold. For example
    [{by: k1, level: sequence_mean, low: 0.999, high: 1.001}]."""
    normalise: bool = False
    """Divide the weights by their mean over what is trained on, of the whole iteration."""
    bypass: bool = False
    """Take the rollout's log-probs as those of the old policy: the loss's own ratio is then that of the
    learner over the rollout, and with loss=reinforce so are the weights. False: decoupled."""
    invalid: InvalidLogprobs = InvalidLogprobs.ERROR
    """A sample of which a rollout log-prob is missing, NaN or infinite. It is counted in any case."""
    allow_off_with_fp8: bool = False
    """Say yes to an FP8 rollout without correction."""


class KlUse(StrEnum):
    OFF = "off"
    LOSS = "loss"  # a term of the loss
    REWARD = "reward"  # taken from the reward, before advantages are made of it


class Kl(Section):
    """KL divergence of the policy from a reference: the policy that the run starts from, a fork's that
    of its first parent. The learner holds a second copy of the weights for it."""

    use: KlUse = KlUse.OFF
    """Where it goes: into the loss, or off the reward."""
    beta: NonNegativeFloat = 0.0
    """Its weight. 0: it is measured only."""
    estimator: Estimator | None = None
    """Of which value. The gradient in the loss is that of the KL whichever it is. Empty: k3 in the
    loss, k1 in the reward, whose policy gradient is that of the KL."""

    @property
    def is_on(self) -> bool:
        return self.use is not KlUse.OFF

    @property
    def by(self) -> Estimator:
        """The estimator, settled."""
        default = Estimator.K1 if self.use is KlUse.REWARD else Estimator.K3
        return self.estimator or default


class Objective(Section):
    """The keys of `learner` that decide what is optimised."""

    advantage: AdvantageKind = AdvantageKind.GRPO
    """How the rewards of a group become advantages."""
    loss: LossKind = LossKind.CLIPPED
    """The policy-gradient loss."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The same bounds: clip_high above clip_low leaves more room upwards (DAPO)."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """loss=clipped: bound of the ratio where the advantage is negative, usually 3. Empty: none."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """How the terms of all tokens become one number."""
    aggregation_length: PositiveInt | None = None
    """Tokens that constant_length divides by. Empty: rollout.max_new_tokens."""
    entropy_bonus: NonNegativeFloat = 0.0
    """Weight of the mean entropy in what is maximised."""
    kl: Kl = Kl()
    """KL divergence from a reference policy."""
    overlong_filter: bool = False
    """Do not train on samples that were cut off at rollout.max_new_tokens. Their rewards still count in
    their group."""
    overlong_buffer: NonNegativeInt = 0
    """Over so many last tokens of rollout.max_new_tokens the reward falls. 0: it does not."""
    overlong_penalty: NonNegativeFloat = 1.0
    """How far it has fallen at the last of them."""
