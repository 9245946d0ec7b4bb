"""What the recipe's objective does in `Learner.train`, on a model small enough to think about."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fp8rl.learner.batch import make_batch
from fp8rl.learner.learner import Learner
from fp8rl.learner.objective import PolicyObjective
from fp8rl.learner.reference import ReferencePolicy
from fp8rl.learner.signal import learning_signal
from fp8rl.learner.validity import LogprobError
from fp8rl.mismatch import mismatch_panel
from fp8rl.recipe.objective import CorrectionMode, InvalidLogprobs, LossKind
from fp8rl.recipe.schema import Recipe
from fp8rl.tables import to_parquet
from tasks.learner_actor import LearnerActor, _require_match
from tests import objective_oracle as oracle

VOCABULARY = 7
REJECT = [
    {"by": "k1", "level": "token", "high": 1.5},
    {"by": "k3", "level": "sequence_mean", "high": 0.2},
]


class Policy(nn.Module):
    """Each token depends on the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def effective_formats(self) -> dict:
        return {}


def learner_for(**sections) -> Learner:
    """A learner of `Policy`, with plain SGD so that a step shows the gradient, and with another
    `Policy` as its reference, used where the recipe asks for one."""
    torch.manual_seed(1)
    reference = ReferencePolicy(Policy(), {}, "digest")
    torch.manual_seed(0)
    learner = object.__new__(Learner)
    options = {"grad_clip": 1e9, "lr": 1.0, "warmup_iterations": 0, **sections.pop("learner", {})}
    learner.recipe = Recipe(learner=options, **sections)
    learner.objective = PolicyObjective(learner.recipe)
    learner.model = Policy()
    learner.plan = {}
    learner.reference = reference
    learner.version = 0
    learner._parameters = list(learner.model.parameters())
    learner.optimiser = torch.optim.SGD(learner._parameters, lr=1.0)
    return learner


def samples(rows=8, spoil=(), invalid="error"):
    """Rollouts whose log-probs are a little off the policy's; `spoil`: rows with a NaN."""
    torch.manual_seed(0)
    table = Policy().table.detach().log_softmax(-1)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, VOCABULARY, 2 + r % 3).tolist() for r in range(rows)]
    answers = [generator.integers(0, VOCABULARY, 1 + r % 4).tolist() for r in range(rows)]
    logprobs = []
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        before = [prompt[-1], *answer[:-1]]
        exact = table[before, answer].numpy() + generator.normal(size=len(answer)) * 0.4
        logprobs.append([math.nan, *exact[1:].tolist()] if row in spoil else exact.tolist())
    batch = make_batch(prompts, answers, logprobs, InvalidLogprobs(invalid))
    advantages = torch.from_numpy(generator.normal(size=rows)).float()
    return batch, advantages


def train(learner, batch, advantages, **options):
    before = learner.model.table.detach().clone()
    result = learner.train(batch, advantages, iteration=1, version=0, **options)
    return result.metrics, before - learner.model.table.detach()


def logprobs_of(table, batch):
    return table[batch.tokens[:, :-1]].log_softmax(-1).gather(-1, batch.tokens[:, 1:, None])[..., 0]


def test_default_step_is_bit_for_bit_the_formula():
    """The numbers of recipes that were there before the choices: clipped loss, token mean, truncated
    importance weights of one update, micro-batch by micro-batch, forward and backward."""
    batch, advantages = samples()
    metrics, step = train(learner_for(learner={"micro_batch": 3}), batch, advantages)
    torch.manual_seed(0)
    table = Policy().table
    total, tokens = 0.0, int(batch.mask.sum())
    for rows in (slice(0, 3), slice(3, 6), slice(6, 8)):
        part = batch.rows(rows)
        c = (table[part.tokens][:, :-1] / 1.0).log_softmax(-1)
        c = c.gather(-1, part.tokens[:, 1:, None]).squeeze(-1)
        p, a = c.detach(), advantages[rows][:, None]
        w = (p - part.g).clamp(-20, 20).exp().clamp(max=2.0)
        ratio = (c - p).exp()
        objective = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) * w
        loss = -torch.where(part.mask, objective, 0.0).sum() / tokens
        loss.backward()
        total += float(loss.detach())
    assert metrics["train/loss"] == total
    want = table.detach() - (table.detach() - table.grad)  # the same rounding as in the optimiser
    assert torch.equal(step, want)
    p = logprobs_of(table.detach(), batch)
    for name, value in mismatch_panel(batch.g, p, batch.mask, truncate=2.0).items():
        assert metrics[f"mismatch/{name}"] == value, name


def reference_logprobs(batch):
    """[B, T] under the reference of `learner_for`."""
    torch.manual_seed(1)
    return logprobs_of(Policy().table.detach().double(), batch)


def oracle_step(recipe, batch, advantages, trained):
    """(gradient of the table, kept tokens) of one update by NumPy, the loss by finite differences."""
    torch.manual_seed(0)
    table = Policy().table.detach().double()
    p = logprobs_of(table, batch).numpy()
    g, mask = batch.g.double().numpy(), batch.mask.numpy() & trained.numpy()[:, None]
    correction, options = recipe.correction, recipe.learner
    weights, kept = np.ones(mask.shape), np.zeros(mask.shape, bool)
    high = correction.icepop[1] if correction.bound == "icepop" else correction.truncate
    low = correction.icepop[0] if correction.bound == "icepop" else correction.truncate_low
    for b in range(len(mask)):
        places = np.flatnonzero(mask[b])
        logs = [p[b, t] - g[b, t] for t in places]
        for n, t in enumerate(places):
            kept[b, t] = all(
                oracle.kept(logs, n, r.by, r.level, r.low, r.high) for r in correction.reject
            )
            if correction.mode != "off":
                weights[b, t] = oracle.bound(
                    oracle.weight(logs, n, correction.mode), correction.bound, low, high
                )
    if correction.normalise:
        weights /= weights[kept].mean()
    old = g if correction.bypass else p
    ref, follows = reference_logprobs(batch).numpy(), correction.bypass and correction.mode != "off"
    kl_weights = weights if follows else weights * np.exp(np.clip(p - old, -20, 20))
    clips = {"low": options.clip_low, "high": options.clip_high, "dual": options.dual_clip}
    length = options.aggregation_length or recipe.rollout.max_new_tokens

    def value(x):
        c = logprobs_of(x, batch).numpy()
        loss = oracle.loss(
            options.loss,
            c,
            old,
            advantages.double().numpy(),
            weights,
            kept,
            how=options.aggregation,
            length=length,
            fixed=p,
            **clips,
        )
        if options.entropy_bonus:
            logs = x[batch.tokens[:, :-1]].log_softmax(-1)
            entropy = -(logs.exp() * logs).sum(-1).numpy()
            rows = [e[m] for e, m in zip(entropy, kept, strict=True)]
            loss -= options.entropy_bonus * oracle.aggregate(rows, options.aggregation, length)
        if options.kl.use == "loss":  # the gradient is that of k2, with the weights held
            how = options.aggregation
            k2 = oracle.kl_term("k2", c, ref, kl_weights, kept, how=how, length=length)
            loss += options.kl.beta * k2
        return loss

    gradient = torch.zeros_like(table)
    for place in np.ndindex(tuple(table.shape)):
        e = torch.zeros_like(table)
        e[place] = 1e-6
        gradient[place] = (value(table + e) - value(table - e)) / 2e-6
    return gradient, kept


KL = {"use": "loss", "beta": 0.7}
CHOICES = {
    "default": ({}, {}),
    "token sum": ({"aggregation": "token_sum"}, {}),
    "constant length": ({"aggregation": "constant_length"}, {"mode": "geometric"}),
    "off": ({}, {"mode": "off"}),
    "sequence weights": ({"aggregation": "sequence_mean_token_sum"}, {"mode": "sequence"}),
    "icepop": ({}, {"bound": "icepop", "icepop": (0.8, 1.2)}),
    "two-sided": ({}, {"truncate": 1.1, "truncate_low": 0.9}),
    "rejection": ({}, {"reject": REJECT}),
    "rejection and sequence mean": ({"aggregation": "sequence_mean_token_mean"}, {"reject": REJECT}),
    "normalised": ({}, {"normalise": True, "reject": REJECT[:1]}),
    "bypass": ({"dual_clip": 1.3}, {"mode": "off", "bypass": True}),
    "bypass reinforce": ({"loss": "reinforce"}, {"bypass": True}),
    "reinforce": ({"loss": "reinforce"}, {}),
    "cispo": ({"loss": "cispo", "clip_high": 0.1}, {"mode": "off", "bypass": True, "reject": REJECT}),
    "gspo": (
        {"loss": "gspo", "aggregation": "sequence_mean_token_mean"},
        {"mode": "off", "bypass": True},
    ),
    "entropy": ({"entropy_bonus": 0.5}, {}),
    "kl": ({"kl": KL}, {}),
    "kl k1, two-sided": ({"kl": KL | {"estimator": "k1"}}, {"truncate": 1.1, "truncate_low": 0.9}),
    "kl bypass": ({"kl": KL}, {"mode": "off", "bypass": True}),
    "kl bypass reinforce": ({"kl": KL, "loss": "reinforce"}, {"bypass": True}),
    "kl normalised": ({"kl": KL}, {"normalise": True, "reject": REJECT[:1]}),
    "kl sequence mean": (
        {"kl": KL, "aggregation": "sequence_mean_token_mean", "loss": "gspo"},
        {"mode": "sequence", "reject": REJECT},
    ),
    "kl constant length": (
        {"kl": KL, "aggregation": "constant_length", "entropy_bonus": 0.5},
        {"bound": "icepop", "icepop": (0.8, 1.2)},
    ),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_steps_along_the_gradient_of_its_formula(choice):
    learner_keys, correction = CHOICES[choice]
    batch, advantages = samples()
    trained = torch.arange(8) != 5
    learner = learner_for(learner=learner_keys, correction=correction)
    metrics, step = train(learner, batch, advantages, trained=trained)
    want, kept = oracle_step(learner.recipe, batch, advantages, trained)
    np.testing.assert_allclose(step.numpy(), want.numpy(), rtol=2e-3, atol=2e-6)
    assert metrics["mismatch/kept_share"] == pytest.approx(kept.sum() / int(batch.mask.sum()))
    if learner.recipe.correction.reject:
        assert 0 < kept.sum() < int(batch.mask[trained].sum())


@pytest.mark.parametrize("choice", CHOICES)
def test_micro_batches_do_not_change_the_step_or_what_is_reported(choice):
    learner_keys, correction = CHOICES[choice]
    batch, advantages = samples()
    first, step = train(learner_for(learner=learner_keys, correction=correction), batch, advantages)
    for size in (1, 3):
        learner = learner_for(learner=learner_keys, correction=correction)
        again, other = train(learner, batch, advantages, micro_batch=size)
        torch.testing.assert_close(other, step, rtol=1e-4, atol=1e-6)
        assert again == pytest.approx(first, rel=1e-4, abs=1e-6)


def test_the_panel_stands_before_and_after_masking_and_is_raw():
    batch, advantages = samples()
    metrics, _ = train(learner_for(correction={"truncate": 1.01, "reject": REJECT}), batch, advantages)
    torch.manual_seed(0)
    p = logprobs_of(Policy().table.detach(), batch)
    ratio = (p - batch.g)[batch.mask].exp()
    assert metrics["mismatch/ratio_max"] == pytest.approx(ratio.max().item(), rel=1e-6)
    assert metrics["mismatch/ratio_max"] > 1.5 >= metrics["mismatch/kept/ratio_max"]
    assert metrics["correction/weight_max"] == pytest.approx(1.01)
    assert metrics["mismatch/kept/token_mult_prob_error"] < metrics["mismatch/token_mult_prob_error"]
    off, _ = train(learner_for(correction={"mode": "off", "truncate": 1.01}), batch, advantages)
    for name, value in off.items():
        if name.startswith("mismatch/"):
            assert metrics[name] == value or name == "mismatch/kept_share"


def test_invalid_log_probs_follow_the_rule_and_are_counted():
    with pytest.raises(LogprobError, match=r"samples \[2, 6\]"):
        samples(spoil=(2, 6))
    clean, advantages = samples()
    left_out = torch.ones(8, dtype=torch.bool)
    left_out[[2, 6]] = False
    _, without = train(learner_for(), clean, advantages, trained=left_out)
    batch, _ = samples(spoil=(2, 6), invalid="drop")
    metrics, dropped = train(learner_for(correction={"invalid": "drop"}), batch, advantages)
    assert torch.equal(dropped, without)
    assert metrics["mismatch/nan_count"] == metrics["mismatch/invalid_samples"] == 2
    assert metrics["mismatch/kept_share"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())

    batch, _ = samples(spoil=(2, 6), invalid="neutral")
    metrics, neutral = train(learner_for(correction={"invalid": "neutral"}), batch, advantages)
    torch.manual_seed(0)
    p = logprobs_of(Policy().table.detach(), clean)
    clean.g[[2, 6]] = torch.where(clean.mask[[2, 6]], p[[2, 6]], 0.0)
    _, want = train(learner_for(), clean, advantages)
    torch.testing.assert_close(neutral, want, rtol=1e-6, atol=0)
    assert metrics["mismatch/nan_count"] == 2
    assert not torch.equal(neutral, dropped)


def test_a_batch_with_nothing_to_train_on_makes_no_step_and_says_so():
    batch, advantages = samples()
    nobody = torch.zeros(8, dtype=torch.bool)
    learner = learner_for(learner={"updates": 2})
    # With weight decay an update without any gradient would still move the weights.
    learner.optimiser = torch.optim.AdamW(learner._parameters, lr=0.1, weight_decay=0.5)
    metrics, step = train(learner, batch, advantages, trained=nobody)
    assert not step.any()
    assert learner.version == 1
    assert metrics["train/empty_updates"] == 2
    assert metrics["train/loss"] == metrics["train/grad_norm"] == metrics["mismatch/kept_share"] == 0
    assert "mismatch/kept/ess" not in metrics
    half = torch.arange(8) < 4
    metrics, step = train(learner_for(learner={"updates": 2}), batch, advantages, trained=half)
    assert metrics["train/empty_updates"] == 1
    assert step.any()


def test_several_updates_share_weights_and_mask_of_the_first():
    batch, advantages = samples()
    options = {"correction": {"reject": REJECT, "normalise": True}}
    metrics, _ = train(learner_for(learner={"updates": 4}, **options), batch, advantages)
    once, _ = train(learner_for(**options), batch, advantages)
    for name in once:
        if name.startswith(("correction/", "mismatch/")):
            assert metrics[name] == once[name], name
    assert metrics["train/ratio_max"] > once["train/ratio_max"] == 1.0


@pytest.mark.parametrize(
    ("updates", "bounds"), [(2, (0, 4, 8)), (3, (0, 2, 5, 8)), (9, tuple(range(9)))]
)
def test_weights_of_bypass_follow_the_learner_from_update_to_update(updates, bounds):
    """Every sample is trained on, also where they do not divide into the updates."""
    batch, advantages = samples()
    options = {"loss": "reinforce", "updates": updates}
    learner = learner_for(learner=options, correction={"bypass": True})
    _, step = train(learner, batch, advantages)
    torch.manual_seed(0)
    start = Policy().table.detach()
    table = start.clone().requires_grad_()
    for rows in (slice(start, end) for start, end in pairwise(bounds)):
        part = batch.rows(rows)
        c = logprobs_of(table, part)
        w = (c.detach() - part.g).exp().clamp(max=2.0)
        terms = (w * advantages[rows][:, None] * c)[part.mask]
        (gradient,) = torch.autograd.grad(-terms.sum() / len(terms), table)
        table = (table - gradient).detach().requires_grad_()
    torch.testing.assert_close(step, start - table, rtol=1e-5, atol=1e-6)


def test_every_choice_is_tried():
    """Another loss or mode needs a line in CHOICES."""
    recipes = [learner_for(learner=a, correction=b).recipe for a, b in CHOICES.values()]
    assert {r.learner.loss for r in recipes} == set(LossKind)
    assert {r.correction.mode for r in recipes} == set(CorrectionMode)


# --- from tables to advantages


def columns():
    rollouts = {
        "prompt_id": [4, 4, 4, 9, 9, 9],
        "tokens": [[1] * n for n in (2, 8, 10, 3, 3, 3)],
        "finish_reason": ["stop", "stop", "length", "stop", "stop", "stop"],
    }
    return rollouts, {"reward": [1.0, 1.0, 1.0, 0.0, 1.0, 0.0]}


def test_shaped_rewards_make_advantages_and_both_are_told():
    rollouts, rewards = columns()
    recipe = Recipe(
        rollout={"max_new_tokens": 10},
        learner={
            **{"overlong_buffer": 4, "overlong_penalty": 0.5, "overlong_filter": True},
            "advantage": "dr_grpo",
        },
    )
    got = learning_signal(rollouts, rewards, recipe)
    want = [0.25, 0.0, -0.25, -1 / 3, 2 / 3, -1 / 3]
    np.testing.assert_allclose(got.advantages.numpy(), want, rtol=1e-6, atol=1e-7)
    assert got.trained.tolist() == [True, True, False, True, True, True]
    assert got.metrics["train/reward_shaped_mean"] == pytest.approx((4 - 0.75) / 6)
    assert got.metrics["train/overlong_filtered"] == pytest.approx(1 / 6)


class Committed:
    """An iteration's tables, as the journal gives them."""

    origin = 0

    def __init__(self, rollouts, rewards):
        self.content = {"rollout": to_parquet(rollouts), "reward": to_parquet(rewards)}
        self.journal = self

    def is_committed(self, iteration, step):
        return False

    def read_file(self, iteration, step, name):
        return self.content[step]


def with_log_probs(rollouts):
    """The rollouts of `columns` with all that the train step reads."""
    return rollouts | {
        "weight_version": [0] * 6,
        "sample": [0, 1, 2] * 2,
        "prompt_tokens": [[2, 3]] * 6,
        "text": ["answer"] * 6,
        "logprobs": [[-1.5] * len(tokens) for tokens in rollouts["tokens"]],
    }


def test_the_train_step_shapes_filters_and_applies_the_rule_for_invalid_log_probs():
    rollouts, rewards = columns()
    rollouts = with_log_probs(rollouts)
    rollouts["logprobs"][4][1] = None
    rewards |= {key: rollouts[key] for key in ("prompt_id", "sample")}
    actor = LearnerActor()
    keys = {"overlong_filter": True, "overlong_buffer": 4}
    actor._learner = learner_for(
        learner=keys, correction={"invalid": "drop"}, rollout={"max_new_tokens": 10}
    )
    actor._learner.weights_digest = lambda: "digest"
    got = actor.train(Committed(rollouts, rewards), 1, 4)
    metrics = got["metrics"]
    assert metrics["train/overlong_filtered"] == pytest.approx(1 / 6)
    assert metrics["train/reward_shaped_mean"] < 4 / 6
    assert metrics["mismatch/nan_count"] == metrics["mismatch/invalid_samples"] == 1
    valid = 2 + 8 + 10 + 3 + 3
    assert metrics["mismatch/kept_share"] == pytest.approx((valid - 10) / valid)
    assert got["version"] == 1
    actor._learner = learner_for(rollout={"max_new_tokens": 10})
    with pytest.raises(LogprobError, match=r"samples \[4\]"):
        actor.train(Committed(rollouts, rewards), 1, 4)


def test_samples_of_a_stale_version_and_rewards_of_other_samples_are_refused():
    rollouts = {"weight_version": [3, 3, 2], "prompt_id": [0, 0, 1], "sample": [0, 1, 0]}
    rewards = {"prompt_id": [0, 0, 1], "sample": [0, 1, 0]}
    with pytest.raises(ValueError, match=r"weight version \[2\] in a batch of version 3"):
        _require_match(rollouts, rewards, 3)
    rollouts["weight_version"] = [3, 3, 3]
    _require_match(rollouts, rewards, 3)
    with pytest.raises(ValueError, match="rewards are not those of the rollouts"):
        _require_match(rollouts, rewards | {"sample": [1, 0, 0]}, 3)


def test_without_shaping_the_signal_is_grpo_of_raw_rewards():
    rollouts, rewards = columns()
    got = learning_signal(rollouts, rewards, Recipe(rollout={"max_new_tokens": 10}))
    groups = np.array(rollouts["prompt_id"])
    want = oracle.advantages("grpo", np.array(rewards["reward"]), groups)
    np.testing.assert_allclose(got.advantages.numpy(), want, rtol=1e-6)
    assert got.advantages[:3].tolist() == [0.0] * 3
    assert got.trained.all()
    assert got.metrics["train/reward_shaped_mean"] == pytest.approx(4 / 6)
