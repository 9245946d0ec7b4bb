"""The KL to a reference policy: in the loss, in the reward, and what is told of it."""

import math

import numpy as np
import pytest
import torch

from fp8rl.learner.batch import make_batch
from fp8rl.learner.kl import (
    PriorLogprobs,
    ReferenceMissingError,
    kl_metrics,
    kl_reward,
    kl_weights,
)
from fp8rl.learner.loss import Denominators
from fp8rl.learner.objective import Plan, PolicyObjective
from fp8rl.learner.signal import learning_signal
from fp8rl.recipe.objective import Estimator
from fp8rl.recipe.schema import Recipe
from tasks.learner_actor import LearnerActor
from tests import objective_oracle as oracle
from tests.unit.test_learner_objective import (
    VOCABULARY,
    Committed,
    Policy,
    columns,
    learner_for,
    logprobs_of,
    reference_logprobs,
    samples,
    train,
    with_log_probs,
)

LOSS = {"use": "loss", "beta": 0.7}
REWARD = {"use": "reward", "beta": 0.3}
WEIGHT_CHOICES = {
    "decoupled": ({}, {"truncate": 1e6}),
    "bypass": ({}, {"mode": "off", "bypass": True}),
    "bypass reinforce": ({"loss": "reinforce"}, {"truncate": 1e6, "bypass": True}),
}


def old_logprobs(batch):
    torch.manual_seed(0)
    return logprobs_of(Policy().table.detach().double(), batch)


# --- in the loss


def objective_for(kl, **correction):
    return PolicyObjective(Recipe(learner={"kl": kl}, correction=correction))


def plan_of(mask, g, ref):
    return Plan(mask, mask, g, torch.zeros(len(mask), dtype=torch.bool), None, ref)


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        ({}, [math.exp(0.5), math.exp(0.5)]),  # exp(p - g) exp(c - p)
        ({"truncate": 1.2}, [1.2 * math.exp(0.2), 1.2]),  # of which the first factor is truncated
        ({"mode": "off"}, [math.exp(0.2), 1.0]),
        ({"mode": "off", "bypass": True}, [math.exp(0.5), math.exp(0.5)]),  # exp(c - g)
    ],
)
def test_loss_and_gradient_by_hand(correction, weights):
    """Two tokens without advantage: l = ref - c is -0.5 and 1."""
    c = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    p, g, ref = torch.tensor([[[-1.2, -2.0]], [[-1.5, -2.5]], [[-1.5, -1.0]]], dtype=torch.float64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    part, n = plan_of(mask, g, ref), Denominators.of(mask)
    out = objective_for(LOSS | {"beta": 0.1}, **correction).loss(
        part, c, p, torch.zeros_like(p), torch.zeros(1, dtype=torch.float64), n
    )
    k3 = [math.exp(-0.5) - 1 + 0.5, math.e - 2]
    want = 0.1 * sum(w * k for w, k in zip(weights, k3, strict=True)) / 2
    assert out.loss.item() == pytest.approx(want, rel=1e-12)
    assert out.kl == out.loss.item()
    out.loss.backward()
    gradient = [0.1 * w * d / 2 for w, d in zip(weights, (0.5, -1.0), strict=True)]
    assert c.grad[0].tolist() == pytest.approx(gradient, rel=1e-12)


@pytest.mark.parametrize("by", [e.value for e in Estimator])
def test_value_of_every_estimator_equals_the_oracle(by):
    """The gradient is compared in test_learner_objective.py, choice by choice."""
    batch, advantages = samples()
    with_kl, _ = train(learner_for(learner={"kl": LOSS | {"estimator": by}}), batch, advantages)
    without, _ = train(learner_for(), batch, advantages)
    p, ref = old_logprobs(batch).numpy(), reference_logprobs(batch).numpy()
    mask, g = batch.mask.numpy(), batch.g.double().numpy()
    weights = np.exp(p - g).clip(max=2.0)
    want = 0.7 * oracle.kl_term(by, p, ref, weights, mask, how="token_mean")
    assert with_kl["train/kl_loss"] == pytest.approx(want, rel=1e-5)
    assert with_kl["train/loss"] - without["train/loss"] == pytest.approx(want, rel=1e-5)
    # What is told of the distance does not depend on what is optimised.
    ones = np.ones_like(p)
    for name, fixed in (("reference_kl", "k3"), ("reference_kl_k1", "k1")):
        told = oracle.kl_term(fixed, p, ref, ones, mask, how="token_mean")
        assert with_kl[f"train/{name}"] == pytest.approx(told, rel=1e-5)
    assert not [name for name in without if "kl" in name and not name.startswith("mismatch/")]


@pytest.mark.parametrize("choice", WEIGHT_CHOICES)
@pytest.mark.parametrize("updates", [1, 2])
def test_gradient_in_expectation_over_another_policys_samples_is_that_of_the_kl(choice, updates):
    """20 responses of one token, each token as often as the rollout engine's distribution says, which
    is not the policy's: the mean over them is the expectation, exactly. In the second update the policy
    is not the one of the old log-probs either."""
    learner_keys, correction = WEIGHT_CHOICES[choice]
    counts = [1, 2, 3, 4, 5, 2, 3]
    answers = [[token] for token, n in enumerate(counts) for _ in range(n)] * updates
    logprobs = [[math.log(counts[token] / 20)] for (token,) in answers]
    batch = make_batch([[0]] * len(answers), answers, logprobs)
    keys = {"kl": {"use": "loss", "beta": 1.0}, "updates": updates, **learner_keys}
    learner = learner_for(learner=keys, correction=correction)
    metrics, step = train(learner, batch, torch.zeros(len(answers)))
    assert metrics["train/kl_loss"] == pytest.approx(metrics["train/loss"])  # nothing else is in it
    torch.manual_seed(0)
    row = Policy().table.detach()[0].double().numpy()
    torch.manual_seed(1)
    ref = Policy().table.detach()[0].double().log_softmax(-1).numpy()
    want = np.zeros(VOCABULARY)
    for _ in range(updates):
        want += oracle.kl_gradient(row - want, ref)
    np.testing.assert_allclose(step[0].numpy(), want, rtol=1e-3, atol=1e-5)
    assert not step[1:].any()
    if choice == "decoupled":  # a planted defect: without the weights it is another's
        learner = learner_for(learner=keys, correction={"mode": "off"})
        _, wrong = train(learner, batch, torch.zeros(len(answers)))
        assert np.abs(wrong[0].numpy() - want).max() > 0.05


def test_outside_the_mask_nothing_matters_be_it_nan():
    torch.manual_seed(3)
    c, p, g, ref = torch.randn(4, 3, 5, dtype=torch.float64)
    mask = torch.rand(3, 5) > 0.4
    mask[1] = False
    advantages = torch.randn(3, dtype=torch.float64)
    found = []
    for junk in (0.0, math.nan, math.inf):
        x = torch.where(mask, c, junk).requires_grad_()
        others = [torch.where(mask, t, junk) for t in (p, g, ref)]
        # Padding too: more columns of it.
        wide = torch.nn.functional.pad(mask, (0, 2))
        y = torch.nn.functional.pad(x, (0, 2), value=junk)
        padded = [torch.nn.functional.pad(t, (0, 2), value=junk) for t in others]
        part = plan_of(wide, padded[1], padded[2])
        out = objective_for(LOSS).loss(
            part, y, padded[0], torch.zeros_like(y), advantages, Denominators.of(wide)
        )
        out.loss.backward()
        found.append((out.loss.item(), out.kl, x.grad.tolist()))
    assert found[0] == found[1] == found[2]
    assert math.isfinite(found[0][0])
    assert found[0][1] > 0


def test_the_weights_keep_their_bounds_and_are_constant():
    c = torch.tensor([[30.0, 1.0, 0.5]], requires_grad=True)
    weights, mask = torch.tensor([[2.0, 0.0, 3.0]]), torch.tensor([[True, True, False]])
    got = kl_weights(weights, c, torch.zeros(1, 3), mask)
    torch.testing.assert_close(got, torch.tensor([[2 * math.exp(20), 0.0, 3.0]]))
    assert not got.requires_grad


@pytest.mark.parametrize("kl", [LOSS, {"use": "loss"}])
def test_at_the_start_the_kl_is_exactly_zero(kl):
    batch, advantages = samples()
    learner = learner_for(learner={"kl": kl, "micro_batch": 3})
    learner.reference.model.table.data.copy_(learner.model.table.data)
    metrics, step = train(learner, batch, advantages)
    names = ("reference_kl", "reference_kl_k1", "kl_loss")
    assert [metrics[f"train/{name}"] for name in names] == [0.0] * 3
    without, plain = train(learner_for(learner={"micro_batch": 3}), batch, advantages)
    assert torch.equal(step, plain)
    assert without.items() <= metrics.items()


def test_measuring_alone_changes_nothing():
    batch, advantages = samples()
    metrics, step = train(learner_for(learner={"kl": {"use": "loss"}}), batch, advantages)
    without, plain = train(learner_for(), batch, advantages)
    assert torch.equal(step, plain)
    assert without.items() <= metrics.items()
    assert metrics["train/reference_kl"] > 0 == metrics["train/kl_loss"]


def test_the_stronger_the_kl_the_nearer_the_reference():
    batch, advantages = samples()
    distances = []
    for beta in (0.0, 2.0, 8.0):
        learner = learner_for(learner={"kl": {"use": "loss", "beta": beta}})
        for version in range(20):
            metrics = learner.train(batch, advantages, iteration=9, version=version).metrics
        distances.append(metrics["train/reference_kl"])
    assert distances[0] > 3 * distances[1] > 9 * distances[2] > 0


def test_both_log_probs_are_at_the_rollouts_temperature():
    batch, advantages = samples()
    learner = learner_for(learner={"kl": LOSS}, rollout={"temperature": 0.6})
    metrics, _ = train(learner, batch, advantages)
    tables = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        tables.append(Policy().table.detach().double() / 0.6)
    p, ref = (logprobs_of(table, batch)[batch.mask] for table in tables)
    assert metrics["train/reference_kl_k1"] == pytest.approx((p - ref).mean().item(), rel=1e-5)


def test_what_is_told_is_of_the_tokens_that_are_trained_on_before_the_first_update():
    batch, advantages = samples()
    trained = torch.arange(8) != 5
    once, _ = train(learner_for(learner={"kl": LOSS}), batch, advantages, trained=trained)
    keys = {"kl": LOSS, "updates": 2}
    twice, _ = train(learner_for(learner=keys), batch, advantages, trained=trained)
    difference = (old_logprobs(batch) - reference_logprobs(batch))[batch.mask & trained[:, None]]
    assert once["train/reference_kl_k1"] == pytest.approx(difference.mean().item(), rel=1e-5)
    for name in ("train/reference_kl", "train/reference_kl_k1"):
        assert twice[name] == pytest.approx(once[name], rel=1e-6)
    nobody, step = train(
        learner_for(learner={"kl": LOSS}), batch, advantages, trained=torch.zeros(8, dtype=torch.bool)
    )
    assert nobody["train/kl_loss"] == 0.0
    assert "train/reference_kl" not in nobody
    assert not step.any()


# --- what does not go unnoticed


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_log_prob_that_is_not_finite_shows(bad):
    mask = torch.tensor([[True, True]])
    got = kl_metrics(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -bad]]), mask)
    assert all(math.isnan(value) for value in got.values())
    assert len(got) == 2
    batch, advantages = samples()
    learner = learner_for(learner={"kl": LOSS})
    learner.reference.model.table.data[batch.tokens[0, 0]] = math.nan
    before = learner.model.table.detach().clone()
    with pytest.raises(FloatingPointError, match="norm is nan"):
        train(learner, batch, advantages)
    assert torch.equal(before, learner.model.table.detach())
    assert learner.version is None


def test_training_without_the_reference_says_what_to_do():
    batch, advantages = samples()
    for kl in (LOSS, REWARD):
        learner = learner_for(learner={"kl": kl})
        learner.reference = None
        with pytest.raises(ReferenceMissingError, match=r"Learner\.load_reference"):
            learner.prior_logprobs(batch, version=0)
        nothing = PriorLogprobs(old_logprobs(batch), None)
        with pytest.raises(ReferenceMissingError, match=f"learner.kl.use={kl['use']} needs"):
            train(learner, batch, advantages, prior=nothing)
        assert learner.version == 0
    learner = learner_for(learner={"kl": LOSS})
    learner.reference = None
    with pytest.raises(ReferenceMissingError):
        train(learner, batch, advantages)


def test_advantages_without_the_kl_are_refused():
    batch, advantages = samples()
    with pytest.raises(ValueError, match=r"Take them from Learner\.prior_logprobs"):
        train(learner_for(learner={"kl": REWARD}), batch, advantages)
    rollouts, rewards = columns()
    with pytest.raises(ValueError, match=r"learner\.kl\.use=reward, .* is not given"):
        learning_signal(rollouts, rewards, Recipe(learner={"kl": REWARD}))
    with pytest.raises(ValueError, match=r"learner\.kl\.use=off, .* is given"):
        learning_signal(rollouts, rewards, Recipe(), torch.zeros(6))


# --- in the reward


def test_reward_by_hand():
    p = torch.tensor([[-1.0, -1.0, 9.0], [-1.0, -1.0, -1.0]])
    ref = torch.tensor([[-1.5, -0.8, math.nan], [-1.0, -1.0, -1.0]])
    mask = torch.tensor([[True, True, False], [True] * 3])
    got = kl_reward(p, ref, mask, beta=0.1, by=Estimator.K1)
    assert got.dtype is torch.float64
    assert got.tolist() == [pytest.approx(-0.1 * (0.5 - 0.2)), 0.0]
    assert math.isnan(kl_reward(p, ref, torch.ones_like(mask), beta=0.1, by=Estimator.K1)[0])
    for by in Estimator:
        want = oracle.kl_reward(by.value, p.double().numpy(), ref.double().numpy(), mask.numpy(), 0.1)
        np.testing.assert_allclose(kl_reward(p, ref, mask, beta=0.1, by=by), want, rtol=1e-6, atol=1e-9)


def test_policy_gradient_of_the_reward_is_that_of_the_kl_with_k1():
    """In expectation, exact over the vocabulary; that of k3 in the reward is not."""
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(5, dtype=torch.float64).log_softmax(-1)
    c = logits.log_softmax(-1)
    want = -oracle.kl_gradient(logits.detach().numpy(), ref.numpy())
    errors = {}
    for by in (Estimator.K1, Estimator.K3):
        reward = kl_reward(c.detach()[:, None], ref[:, None], torch.ones(5, 1).bool(), beta=1.0, by=by)
        (got,) = torch.autograd.grad((c.detach().exp() * reward * c).sum(), logits, retain_graph=True)
        errors[by] = np.abs(got.numpy() - want).max()
    assert errors[Estimator.K1] < 1e-8
    assert errors[Estimator.K3] > 1e-2


def committed():
    """An iteration's tables, of 6 samples in 2 groups."""
    rollouts, rewards = columns()
    generator = np.random.default_rng(2)
    rollouts["tokens"] = [
        generator.integers(0, VOCABULARY, len(t)).tolist() for t in rollouts["tokens"]
    ]
    rollouts = with_log_probs(rollouts)
    rewards |= {key: rollouts[key] for key in ("prompt_id", "sample")}
    return rollouts, rewards


def actor_for(**learner_keys):
    """A learner actor that counts what its two models are asked."""
    actor = LearnerActor()
    actor._learner = learner = learner_for(learner=learner_keys, rollout={"max_new_tokens": 10})
    learner.weights_digest = lambda: "digest"
    asked = {"policy": 0, "reference": 0}
    for name, model in (("policy", learner.model), ("reference", learner.reference.model)):

        def count(*_, name=name):
            asked[name] += 1

        model.register_forward_hook(count)
    return actor, asked


@pytest.mark.parametrize("by", [None, "k3"])
def test_the_train_step_takes_the_kl_from_the_rewards_before_advantages(by):
    rollouts, rewards = committed()
    overlong = {"overlong_buffer": 4, "overlong_penalty": 0.5}
    keys = {"advantage": "rloo", **overlong}
    actor, asked = actor_for(kl=REWARD | {"estimator": by}, **keys)
    start = actor.learner.model.table.detach().clone()
    metrics = actor.train(Committed(rollouts, rewards), 1, 4)["metrics"]
    assert asked == {"policy": 4, "reference": 2}  # two micro-batches; the old log-probs once
    batch = make_batch(rollouts["prompt_tokens"], rollouts["tokens"], rollouts["logprobs"])
    p, ref = old_logprobs(batch).numpy(), reference_logprobs(batch).numpy()
    added = oracle.kl_reward(by or "k1", p, ref, batch.mask.numpy(), 0.3)
    penalty = np.array([0, -0.25, -0.5, 0, 0, 0])
    shaped = np.array(rewards["reward"]) + penalty + added
    assert metrics["train/kl_reward_mean"] == pytest.approx(added.mean(), rel=1e-5)
    assert metrics["train/reward_shaped_mean"] == pytest.approx(shaped.mean(), rel=1e-5)
    assert metrics["train/reference_kl_k1"] == pytest.approx((p - ref)[batch.mask].mean(), rel=1e-5)
    assert "train/kl_loss" not in metrics
    want = oracle.advantages("rloo", shaped, np.array(rollouts["prompt_id"]))
    _, plain = train(learner_for(rollout={"max_new_tokens": 10}), batch, torch.from_numpy(want).float())
    step = start - actor.learner.model.table.detach()
    torch.testing.assert_close(step, plain, rtol=1e-4, atol=1e-6)


def test_without_a_kl_nothing_is_computed_for_it():
    rollouts, rewards = committed()
    actor, asked = actor_for()
    off = actor.train(Committed(rollouts, rewards), 1, 4)["metrics"]
    assert asked == {"policy": 2, "reference": 0}
    actor, asked = actor_for(kl=LOSS)
    on = actor.train(Committed(rollouts, rewards), 1, 4)["metrics"]
    assert asked == {"policy": 2, "reference": 2}
    extra = {"train/reference_kl", "train/reference_kl_k1", "train/kl_loss"}
    assert on.keys() - off.keys() == extra
    assert "train/kl_reward_mean" not in on


def test_a_reward_whose_kl_is_nan_stops_the_step():
    rollouts, rewards = committed()
    actor, _ = actor_for(kl=REWARD)
    actor.learner.reference.model.table.data[:] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        actor.train(Committed(rollouts, rewards), 1, 4)
    assert actor.learner.version == 0


def test_micro_batches_do_not_change_the_reward():
    rollouts, rewards = committed()
    found = []
    for size in (1, 4, 6):
        actor, _ = actor_for(kl=REWARD, advantage="rloo")
        found.append(actor.train(Committed(rollouts, rewards), 1, size)["metrics"])
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-4, abs=1e-6)
