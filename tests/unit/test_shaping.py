"""DAPO's pure decisions: overlong penalty and filter, and what dynamic sampling keeps."""

import math

import numpy as np
import pytest
import torch

from fp8rl.learner.shaping import (
    Draw,
    choose_groups,
    informative,
    next_draw,
    overlong_filter,
    overlong_penalty,
)


def test_overlong_penalty_by_hand():
    """Of 10 tokens the last 4 cost: 0 up to 6, then a quarter of 2 each."""
    lengths = torch.tensor([0, 6, 7, 8, 9, 10])
    got = overlong_penalty(lengths, longest=10, buffer=4, penalty=2.0)
    assert got.tolist() == [0, 0, -0.5, -1.0, -1.5, -2.0]
    assert got.dtype == torch.float64
    assert not torch.signbit(got[:2]).any()


def test_overlong_penalty_equals_the_formula_of_the_paper():
    for longest, buffer, penalty in ((20, 20, 1.0), (20, 1, 3.0), (7, 5, 0.1)):
        lengths = np.arange(longest + 1)
        want = np.minimum(-(lengths - (longest - buffer)) / buffer * penalty, 0)
        got = overlong_penalty(
            torch.from_numpy(lengths), longest=longest, buffer=buffer, penalty=penalty
        )
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-12, atol=1e-15)


def test_no_buffer_no_penalty_and_nonsense_is_refused():
    lengths = torch.tensor([1, 10])
    assert overlong_penalty(lengths, longest=10, buffer=0, penalty=1.0).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="buffer of 11"):
        overlong_penalty(lengths, longest=10, buffer=11, penalty=1.0)
    with pytest.raises(ValueError, match="response of 10 tokens"):
        overlong_penalty(lengths, longest=9, buffer=2, penalty=1.0)


def test_overlong_filter_leaves_out_what_was_cut_off():
    assert overlong_filter(["stop", "length", "stop"]).tolist() == [True, False, True]


def test_dynamic_sampling_keeps_groups_with_a_difference():
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.5, 1.0, 0.5, 0.0, 0.0])
    groups = torch.tensor([3, 8, 3, 5, 8, 5, 1, 1])
    want = [False, True, False, False, True, False, False, False]
    assert informative(rewards, groups).tolist() == want
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    assert informative(rewards[order], groups[order]).tolist() == [want[i] for i in order]
    with pytest.raises(ValueError, match="NaN"):
        informative(torch.tensor([1.0, math.nan]), torch.tensor([0, 0]))


def test_a_length_penalty_would_make_a_group_look_informative():
    """Why raw rewards decide: all right, of different lengths."""
    raw, groups = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    shaped = raw + overlong_penalty(torch.tensor([1, 9, 10]), longest=10, buffer=5, penalty=1.0)
    assert not informative(raw, groups).any()
    assert informative(shaped, groups).all()


def test_chosen_groups_are_the_first_informative_ones_by_id():
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    groups = torch.tensor([9, 9, 4, 4, 2, 2, 7, 7])
    assert groups[choose_groups(rewards, groups, 2)].unique().tolist() == [2, 7]
    assert groups[choose_groups(rewards, groups, 9)].unique().tolist() == [2, 7, 9]
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    got = choose_groups(rewards[order], groups[order], 2)
    assert torch.equal(got, choose_groups(rewards, groups, 2)[order])
    assert not choose_groups(torch.zeros(8), groups, 2).any()


def test_the_budget_ends_dynamic_sampling():
    assert next_draw(8, wanted=8, drawn=1, budget=3) is Draw.ENOUGH
    assert next_draw(7, wanted=8, drawn=2, budget=3) is Draw.AGAIN
    assert next_draw(7, wanted=8, drawn=3, budget=3) is Draw.GIVE_UP
    assert next_draw(9, wanted=8, drawn=3, budget=3) is Draw.ENOUGH
