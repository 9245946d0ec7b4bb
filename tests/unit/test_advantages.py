"""Advantages within groups: hand examples, a NumPy oracle, and what must not matter."""

import math

import numpy as np
import pytest
import torch

from fp8rl.learner.advantage import advantages
from fp8rl.recipe.objective import AdvantageKind
from tests import objective_oracle as oracle

KINDS = list(AdvantageKind)


def test_by_hand():
    """Group 7: rewards 1, 0, 0, mean 1/3. Group 3: all equal."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    groups = torch.tensor([7, 7, 7, 3, 3, 3])
    squares = (2 / 3) ** 2 + 2 * (1 / 3) ** 2
    want = {
        "dr_grpo": [2 / 3, -1 / 3, -1 / 3, 0, 0, 0],
        "grpo": [x / (math.sqrt(squares / 2) + 1e-6) for x in (2 / 3, -1 / 3, -1 / 3)] + [0] * 3,
        "rloo": [1.0, -0.5, -0.5, 0, 0, 0],
        "reinforce_plus_plus": [x / (math.sqrt(squares / 5) + 1e-6) for x in (2 / 3, -1 / 3, -1 / 3)]
        + [0] * 3,
    }
    for kind in KINDS:
        np.testing.assert_allclose(advantages(kind, rewards, groups).numpy(), want[kind], rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_oracle_for_ragged_groups_in_any_order(kind):
    generator = np.random.default_rng(1)
    groups = generator.permutation(np.repeat([5, -2, 9, 1], [2, 7, 3, 4]))
    rewards = generator.random(16)
    rewards[groups == 9] = 0.1 + 0.2
    got = advantages(kind, torch.from_numpy(rewards), torch.from_numpy(groups)).numpy()
    np.testing.assert_allclose(got, oracle.advantages(kind, rewards, groups), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-30, -7.7])
def test_equal_rewards_give_exactly_zero_beside_groups_that_differ(kind, dtype, value):
    rewards = torch.tensor([value] * 7 + [0.0, 1.0, 0.3], dtype=dtype)
    groups = torch.tensor([4] * 7 + [2] * 3)
    got = advantages(kind, rewards, groups)
    assert got[:7].tolist() == [0.0] * 7
    assert got.dtype == dtype
    assert (got[7:] != 0).all()
    assert advantages(kind, rewards[:7], groups[:7]).tolist() == [0.0] * 7


@pytest.mark.parametrize("kind", KINDS)
def test_does_not_depend_on_the_order_of_samples_or_the_names_of_groups(kind):
    torch.manual_seed(0)
    rewards, groups = torch.rand(24, dtype=torch.float64), torch.arange(24) % 6
    order = torch.randperm(24)
    want = advantages(kind, rewards, groups)
    got = advantages(kind, rewards[order], groups[order])
    torch.testing.assert_close(got, want[order], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(advantages(kind, rewards, 50 - 7 * groups), want, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_group_of_one_and_non_finite_rewards_are_refused(kind):
    with pytest.raises(ValueError, match="single sample"):
        advantages(kind, torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]))
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="NaN"):
            advantages(kind, torch.tensor([1.0, bad]), torch.tensor([0, 0]))


def test_rewards_paired_with_other_groups_are_seen():
    """A planted defect: groups taken from positions where the samples were interleaved."""
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    by_id = advantages(AdvantageKind.DR_GRPO, rewards, torch.tensor([0, 1, 0, 1]))
    by_position = advantages(AdvantageKind.DR_GRPO, rewards, torch.tensor([0, 0, 1, 1]))
    assert by_id.tolist() == [0.0] * 4
    assert by_position.tolist() == [0.5, -0.5, 0.5, -0.5]
