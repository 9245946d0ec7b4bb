"""The reference policy with the real learner: exactly 0 at the start, frozen, and never in the way of a
resumed run's bits."""

from types import SimpleNamespace

import pytest
import torch

from fp8rl.learner.batch import make_batch
from fp8rl.learner.checkpoint import capture
from fp8rl.learner.kl import ReferenceMissingError
from fp8rl.learner.learner import Learner
from fp8rl.learner.reference import ReferenceMismatchError
from fp8rl.recipe.precision import Linear
from tasks.learner_actor import LearnerActor
from tests.models import RAGGED, recipe_with, write_model

ZEROES = ("train/reference_kl", "train/reference_kl_k1", "train/kl_loss")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(RAGGED, tmp_path_factory.mktemp("model"))


def recipe_of(kl, linear=Linear.BF16, **options):
    learner = {"lr": 1e-3, "warmup_iterations": 0, "micro_batch": 3, "kl": kl} | options
    return recipe_with(
        model={"tiny": RAGGED.model_dump()},
        precision={"rollout": linear, "learner": linear},
        learner=learner,
        rollout={"temperature": 0.8},
    )


def learner_for(model_dir, kl, linear=Linear.BF16, **options) -> Learner:
    learner = Learner(model_dir, recipe_of(kl, linear, **options))
    learner.load(model_dir, 0)
    learner.load_reference(model_dir)
    return learner


def batch_of(learner):
    """The same samples whoever trains on them, with log-probs near the policy's of that moment."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, 90, (3 + r % 3,), generator=generator).tolist() for r in range(8)]
    answers = [torch.randint(4, 90, (2 + r % 4,), generator=generator).tolist() for r in range(8)]
    batch = make_batch(prompts, answers)
    noise = 0.01 * torch.randn(batch.g.shape, generator=generator)
    exact = learner.logprobs(batch, version=learner.version) + noise
    batch.g.copy_(torch.where(batch.mask, exact, 0.0))
    return batch


def train(learner, steps=1):
    """Metrics of each of some training steps."""
    found, advantages = [], torch.linspace(-1, 1, 8)
    for _ in range(steps):
        version = learner.version
        batch = batch_of(learner)
        found.append(learner.train(batch, advantages, iteration=version + 1, version=version).metrics)
    return found


@pytest.mark.parametrize("linear", list(Linear))
@pytest.mark.parametrize("updates", [1, 2])
def test_the_kl_is_exactly_zero_at_version_0_and_positive_after_an_update(model_dir, linear, updates):
    learner = learner_for(model_dir, {"use": "loss", "beta": 0.1}, linear, updates=updates)
    first, second = train(learner, 2)
    assert [first[name] for name in ZEROES[:2]] == [0.0, 0.0]
    if updates == 1:
        assert first["train/kl_loss"] == 0.0
    assert second["train/reference_kl"] > 0
    assert second["train/kl_loss"] > 0
    plain = learner_for(model_dir, {}, linear, updates=1)
    if updates == 1:  # a term that is exactly 0 has no gradient: version 1 is that of a run without KL
        train(plain)
        again = learner_for(model_dir, {"use": "loss", "beta": 0.1}, linear)
        train(again)
        assert plain.weights_digest() == again.weights_digest()


def test_a_large_beta_holds_the_policy_nearer(model_dir):
    distances = []
    for beta in (0.0, 0.5, 5.0):
        learner = learner_for(model_dir, {"use": "loss", "beta": beta}, lr=1e-4)
        distances.append(train(learner, 4)[-1]["train/reference_kl"])
    assert distances[0] > distances[1] > 2 * distances[2] > 0


def test_the_reference_is_frozen_and_in_no_checkpoint(model_dir):
    learner = learner_for(model_dir, {"use": "loss", "beta": 0.1}, Linear.FP8)
    held = capture(learner.model, learner.optimiser).keys()
    before = learner.reference.model.export()
    train(learner, 2)
    after = learner.reference.model.export()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(p.requires_grad or p.grad is not None for p in learner.reference.model.parameters())
    plain = learner_for(model_dir, {}, Linear.FP8)
    assert plain.reference is None
    assert held == capture(plain.model, plain.optimiser).keys()


def test_loading_it_leaves_the_random_state_alone(model_dir):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    learner = Learner(model_dir, recipe_of({"use": "loss", "beta": 0.1}))
    torch.set_rng_state(before)
    learner.load_reference(model_dir)
    assert torch.equal(torch.get_rng_state(), before)
    learner.load(model_dir, 0)
    learner.reference = None
    with pytest.raises(ReferenceMissingError):
        train(learner)


class Context(SimpleNamespace):
    """As much of a run's context as the learner actor's `restore` looks at. The checkpoint is of
    another run, as a fork's is."""

    journal = SimpleNamespace(run_id="mine")


@pytest.mark.parametrize("linear", list(Linear))
def test_a_restored_learner_has_the_same_reference_and_goes_on_bit_for_bit(model_dir, tmp_path, linear):
    context = Context(model_dir=model_dir, recipe=recipe_of({"use": "loss", "beta": 0.5}, linear))
    actor = LearnerActor()
    assert actor.restore(context, None)["version"] == 0
    train(actor.learner)
    folder = tmp_path / "checkpoints" / "00001"
    state = {"run_id": "another", "recipe_digest": "d"}
    actor.start_checkpoint(folder, 1, state, False)
    actor.finish_checkpoint(True)
    (straight,) = train(actor.learner)
    digest = actor.learner.weights_digest()
    assert straight["train/reference_kl"] > 0

    again = LearnerActor()
    assert again.restore(context, folder)["version"] == 1
    (replayed,) = train(again.learner)
    assert replayed == straight
    assert again.learner.weights_digest() == digest

    changed = write_model(RAGGED, tmp_path / "changed", seed=5)
    with pytest.raises(ReferenceMismatchError, match="Put the run's initial weights back"):
        LearnerActor().restore(Context(model_dir=changed, recipe=context.recipe), folder)
    # A fork that begins with a KL where its parent had none has nothing to compare with.
    plain = Context(model_dir=model_dir, recipe=recipe_of({}, linear))
    actor.restore(plain, None)
    train(actor.learner)
    other = tmp_path / "other" / "00001"
    actor.start_checkpoint(other, 1, state, False)
    actor.finish_checkpoint(True)
    again.restore(context, other)
    assert train(again.learner)[0]["train/reference_kl"] > 0
