"""DAPO's overlong penalty and filter."""

import numpy as np
import pytest
import torch

from fp8rl.learner.shaping import overlong_filter, overlong_penalty


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
