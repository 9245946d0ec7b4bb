"""Which choices of the objective go together; `rules.py` asks."""

from collections.abc import Iterator

from fp8rl.recipe.objective import (
    AdvantageKind,
    Aggregation,
    Bound,
    CorrectionMode,
    Estimator,
    Kl,
    KlUse,
    Level,
    LossKind,
    Rejection,
)
from fp8rl.recipe.schema import Recipe

Problem = tuple[tuple[str, ...], str]


def compares_logprobs(recipe: Recipe) -> bool:
    """Whether training corrects for log-probs that differ between rollout and learner: by weights, by
    rejection, or by a loss whose own ratio is over the rollout's."""
    correction = recipe.correction
    by_ratio = correction.bypass and recipe.learner.loss is not LossKind.REINFORCE
    return correction.mode is not CorrectionMode.OFF or bool(correction.reject) or by_ratio


def objective_problems(recipe: Recipe) -> Iterator[Problem]:
    """Recipe keys at fault, and why, and what to do."""
    yield from _dynamic_sampling(recipe)
    yield from _loss(recipe)
    yield from _kl(recipe)
    yield from _correction(recipe)
    yield from _rejection(recipe.correction.reject)


def _dynamic_sampling(recipe: Recipe) -> Iterator[Problem]:
    rollout, total = recipe.rollout, recipe.task.train_prompts
    per_epoch = rollout.max_draws if total is None else total // rollout.prompts
    if rollout.max_draws > max(per_epoch, 1):  # fewer prompts than one draw has are refused besides
        yield (
            ("rollout.max_draws", "rollout.prompts", "task.train_prompts"),
            f"an iteration draws no prompt twice, and {total} prompts are enough for {per_epoch} draws "
            f"of {rollout.prompts}. Lower rollout.max_draws or rollout.prompts, or raise "
            "task.train_prompts",
        )
    if rollout.max_draws > 1 and rollout.samples < 2:
        yield (
            ("rollout.max_draws", "rollout.samples"),
            "the reward of one sample differs from no other: every draw would be thrown away. Set "
            "rollout.samples=2 or more, or rollout.max_draws=1",
        )


def _loss(recipe: Recipe) -> Iterator[Problem]:
    learner = recipe.learner
    per_sequence = Aggregation.SEQUENCE_MEAN_TOKEN_MEAN
    if learner.loss is LossKind.GSPO and learner.aggregation is not per_sequence:
        yield (
            ("learner.loss", "learner.aggregation"),
            "GSPO's ratio belongs to a sequence, and its gradient is right only for a mean over "
            f"sequences. Set learner.aggregation={per_sequence}",
        )
    correction = recipe.correction
    weighted = correction.bypass and correction.mode is not CorrectionMode.OFF
    if learner.loss is LossKind.REINFORCE and learner.updates > 1 and not weighted:
        yield (
            ("learner.loss", "learner.updates", "correction.bypass"),
            "plain REINFORCE has no ratio, so the second update would train on samples of other "
            "weights. Set learner.updates=1, or correction.bypass=true with a correction.mode: its "
            "weights follow the learner",
        )
    if learner.overlong_buffer > recipe.rollout.max_new_tokens:
        yield (
            ("learner.overlong_buffer", "rollout.max_new_tokens"),
            f"a buffer of {learner.overlong_buffer} tokens in responses of at most "
            f"{recipe.rollout.max_new_tokens}. Make it smaller",
        )


def _kl(recipe: Recipe) -> Iterator[Problem]:
    rollout, kl = recipe.rollout, recipe.learner.kl
    if kl.is_on and (rollout.top_p != 1.0 or rollout.top_k != -1):
        yield (
            ("learner.kl.use", "rollout.top_p", "rollout.top_k"),
            "the KL is estimated on the tokens that the policy draws, and top-p and top-k draw from "
            "another distribution. Set top_p=1 and top_k=-1, or learner.kl.use=off",
        )


def _correction(recipe: Recipe) -> Iterator[Problem]:
    correction = recipe.correction
    weighted = correction.mode is not CorrectionMode.OFF
    if correction.bypass and weighted and recipe.learner.loss is not LossKind.REINFORCE:
        yield (
            ("correction.bypass", "correction.mode"),
            "with bypass the loss's own ratio is over the rollout's log-probs; weights would count the "
            "difference twice. Set correction.mode=off, or learner.loss=reinforce",
        )
    if correction.normalise and correction.bypass:
        yield (
            ("correction.normalise", "correction.bypass"),
            "with bypass the weights change with every update, and their mean over the batch is not "
            "known before it is trained on. Set one of them to false",
        )
    if correction.normalise and not weighted:
        yield (
            ("correction.normalise", "correction.mode"),
            "there are no weights to normalise. Set correction.normalise=false, or another mode",
        )
    low, high = correction.icepop
    if not low < 1 < high:
        yield (
            ("correction.icepop",),
            f"[{low}, {high}] leaves out 1, the ratio of perfect agreement",
        )


def _rejection(rules: tuple[Rejection, ...]) -> Iterator[Problem]:
    key = ("correction.reject",)
    seen = set()
    for rule in rules:
        name = f"{rule.by} at level {rule.level}"
        if (rule.by, rule.level) in seen:
            yield key, f"{name} stands there twice. Keep the narrower one"
        seen.add((rule.by, rule.level))
        if rule.by is not Estimator.K1:
            if rule.low is not None:
                yield key, f"{name} has an upper bound only. Leave low out"
            continue
        if rule.level is Level.SEQUENCE_MAX:
            yield key, f"{name} is not defined: k1 has a sign. Take k2 or k3 there"
        low = 1 / rule.high if rule.low is None else rule.low
        if not low < 1 < rule.high:
            yield key, f"{name}: [{low:g}, {rule.high:g}] leaves out 1, the ratio of perfect agreement"


def objective_warnings(recipe: Recipe) -> list[str]:
    """What is allowed and has no effect, or an unusual one."""
    learner, correction = recipe.learner, recipe.correction
    found = []
    if learner.dual_clip is not None and learner.loss not in (LossKind.CLIPPED, LossKind.GSPO):
        found.append(f"learner.dual_clip has no effect: learner.loss={learner.loss} is not clipped so")
    fixed = learner.aggregation is Aggregation.CONSTANT_LENGTH
    if learner.aggregation_length is not None and not fixed:
        found.append(
            "learner.aggregation_length has no effect: only aggregation=constant_length has it"
        )
    bounds = correction.truncate_low is not None or correction.bound is Bound.ICEPOP
    if bounds and correction.mode is CorrectionMode.OFF:
        found.append(
            "correction.bound and its limits have no effect: correction.mode=off has no weights"
        )
    elif correction.truncate_low is not None and correction.bound is Bound.ICEPOP:
        found.append(
            "correction.truncate_low has no effect: correction.bound=icepop has its own limits"
        )
    if learner.loss is LossKind.GSPO and max(learner.clip_low, learner.clip_high) > 0.05:
        found.append(
            f"learner.clip_low={learner.clip_low}, clip_high={learner.clip_high}: GSPO's ratio is a "
            "mean over the sequence and hardly leaves 1; its paper clips at 3e-4 and 4e-4"
        )
    return found + _kl_warnings(recipe)


def _kl_warnings(recipe: Recipe) -> list[str]:
    kl = recipe.learner.kl
    if not kl.is_on:
        given = [key for key in ("beta", "estimator") if getattr(kl, key) != getattr(Kl(), key)]
        return [f"learner.kl.{key} has no effect: set learner.kl.use=loss or reward" for key in given]
    if not kl.beta:
        return ["learner.kl.beta=0: the KL to the reference is measured and changes nothing"]
    if kl.use is not KlUse.REWARD:
        return []
    found = []
    if kl.by is not Estimator.K1:
        found.append(
            f"learner.kl.estimator={kl.by}: in the reward only k1 has the policy gradient of the KL. "
            "Leave it empty"
        )
    if recipe.learner.advantage is AdvantageKind.GRPO:
        found.append(
            "learner.advantage=grpo, learner.kl.use=reward: where all rewards of a group are equal "
            "their standard deviation is that of the KL alone, which is divided by it and so weighs as "
            "much as a right answer, whatever beta is. Set another advantage, or learner.kl.use=loss"
        )
    return found
