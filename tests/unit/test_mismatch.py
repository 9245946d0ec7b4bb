"""The mismatch panel: a NumPy oracle, hand examples, and what must show in it."""

import math

import numpy as np
import pytest
import torch

from fp8rl.mismatch import before_and_after, mismatch_panel, sequence_errors


def k3(x):
    return np.exp(x) - 1 - x


def inputs(seed=0):
    generator = np.random.default_rng(seed)
    g = (-generator.random((5, 9)) * 3).astype(np.float32)
    p = (g + generator.normal(size=(5, 9)) * 0.2).astype(np.float32)
    mask = generator.random((5, 9)) > 0.4
    return g, p, mask


def panel_oracle(g, p, mask, low, high):
    rows = [b for b in range(len(g)) if mask[b].any()]
    g, p = g.astype(np.float64), p.astype(np.float64)
    gt, pt = g[mask], p[mask]
    ratio, error = np.exp(pt - gt), np.exp(np.abs(gt - pt))
    m = np.log((np.exp(pt) + np.exp(gt)) / 2)
    gaps = [(p - g)[b][mask[b]] for b in rows]
    return {
        "token_mult_prob_error": np.mean(error),
        "token_mult_prob_error_p50": np.quantile(error, 0.5),
        "token_mult_prob_error_p99": np.quantile(error, 0.99),
        "token_mult_prob_error_max": error.max(),
        "sequence_mult_prob_error_max": max(np.exp(np.abs(gap)).mean() for gap in gaps),
        "logprob_difference": np.mean(np.abs(gt - pt)),
        "prob_difference": np.mean(np.abs(np.exp(gt) - np.exp(pt))),
        "prob_difference_max": np.max(np.abs(np.exp(gt) - np.exp(pt))),
        "kl_k1": np.mean(gt - pt),
        "kl_k3": np.mean(k3(pt - gt)),
        "js_divergence": np.mean((k3(pt - m) + k3(gt - m)) / 2),
        "ratio_mean": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "sequence_log_ratio_min": min(gap.sum() for gap in gaps),
        "sequence_log_ratio_max": max(gap.sum() for gap in gaps),
        "geometric_ratio_min": min(np.exp(gap.mean()) for gap in gaps),
        "geometric_ratio_max": max(np.exp(gap.mean()) for gap in gaps),
        "ess": 1 / np.mean((ratio / ratio.mean()) ** 2),
        "out_of_bounds": np.mean((ratio > high) | (ratio < low)),
        "ppl_difference": np.mean([-gap.mean() for gap in gaps]),
        "nan_count": 0,
    }


@pytest.mark.parametrize("low", [None, 0.9])
@pytest.mark.parametrize("empty_row", [False, True])
def test_equals_a_float64_oracle(low, empty_row):
    g, p, mask = inputs()
    mask[3] &= not empty_row
    got = mismatch_panel(*map(torch.from_numpy, (g, p, mask)), truncate=1.2, low=low)
    want = panel_oracle(g, p, mask, low or 1 / 1.2, 1.2)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=1e-6, abs=1e-7), name


def test_by_hand():
    """Two tokens with probabilities 1/2 and 1/4 in the rollout, 1/4 and 1/2 in the learner."""
    g = torch.tensor([[0.5, 0.25]], dtype=torch.float64).log()
    p = torch.tensor([[0.25, 0.5]], dtype=torch.float64).log()
    got = mismatch_panel(g, p, torch.ones(1, 2, dtype=torch.bool), truncate=1.5)
    assert got["token_mult_prob_error"] == pytest.approx(2.0)
    assert got["logprob_difference"] == pytest.approx(math.log(2))
    assert got["prob_difference"] == pytest.approx(0.25)
    assert got["kl_k1"] == got["ppl_difference"] == pytest.approx(0.0, abs=1e-15)
    assert got["kl_k3"] == pytest.approx(0.25)  # (1/2 - 1 + ln 2 + 2 - 1 - ln 2) / 2
    assert got["ratio_mean"] == pytest.approx(1.25)
    assert got["ess"] == pytest.approx(1.25**2 / 2.125)
    assert got["out_of_bounds"] == 1.0
    assert got["geometric_ratio_max"] == pytest.approx(1.0)


def test_equal_log_probs_are_perfect():
    g = -torch.rand(2, 3)
    panel = mismatch_panel(g, g.clone(), torch.ones(2, 3, dtype=torch.bool), truncate=2)
    ones = ("token_mult_prob_error", "ess", "ratio_min", "ratio_max", "geometric_ratio_max")
    assert all(panel[name] == 1.0 for name in ones)
    zeros = ("kl_k1", "kl_k3", "js_divergence", "prob_difference", "out_of_bounds", "nan_count")
    assert all(panel[name] == 0.0 for name in zeros)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_a_log_prob_that_is_not_finite_makes_every_figure_nan_and_is_counted(bad, side):
    """One that stayed a number would pass a threshold."""
    logprobs = [-torch.rand(2, 3), -torch.rand(2, 3)]
    logprobs[side][0, 0] = bad
    mask = torch.ones(2, 3, dtype=torch.bool)
    panel = mismatch_panel(*logprobs, mask, truncate=2)
    assert panel.pop("nan_count") == 1
    assert all(math.isnan(value) for value in panel.values()), panel
    errors = sequence_errors(*logprobs, mask)
    assert torch.isnan(errors).tolist() == [True, False]
    mask[0, 0] = False
    assert all(math.isfinite(v) for v in mismatch_panel(*logprobs, mask, truncate=2).values())


def test_an_empty_mask_is_refused():
    with pytest.raises(ValueError, match="no response token"):
        mismatch_panel(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3).bool(), truncate=2)


def test_a_shift_by_one_token_shows():
    """A planted defect: rollout log-probs one place off their tokens."""
    g, _, mask = inputs()
    g, mask = torch.from_numpy(g), torch.from_numpy(mask)
    right = mismatch_panel(g, g.clone(), mask, truncate=2)
    shifted = mismatch_panel(g.roll(1, 1), g, mask, truncate=2)
    assert right["token_mult_prob_error"] == 1.0
    assert shifted["token_mult_prob_error"] > 1.5


def test_padding_and_order_do_not_matter():
    g, p, mask = map(torch.from_numpy, inputs())
    want = mismatch_panel(g, p, mask, truncate=2)
    for sides in ((0, 3), (4, 0)):
        wide = (torch.nn.functional.pad(x, sides) for x in (g, p, mask))
        assert mismatch_panel(*wide, truncate=2) == pytest.approx(want, rel=1e-6)
    order = [3, 0, 4, 2, 1]
    assert mismatch_panel(g[order], p[order], mask[order], truncate=2) == pytest.approx(want, rel=1e-6)


def test_the_panel_before_masking_does_not_see_the_masking():
    g, p, mask = map(torch.from_numpy, inputs())
    kept = mask.clone()
    kept[0] = False
    raw = mismatch_panel(g, p, mask, truncate=2)
    got = before_and_after(g, p, mask, kept, truncate=2)
    assert {name: got[name] for name in raw} == raw
    after = mismatch_panel(g, p, kept, truncate=2)
    assert {name: got[f"kept/{name}"] for name in after} == after
    assert got["kept_share"] == pytest.approx(int(kept.sum()) / int(mask.sum()))
    unmasked = before_and_after(g, p, mask, mask.clone(), truncate=2)
    assert unmasked == raw | {"kept_share": 1.0}
    nothing = before_and_after(g, p, mask, torch.zeros_like(mask), truncate=2)
    assert nothing == raw | {"kept_share": 0.0}


def test_the_worst_sequence_can_be_named():
    g = torch.zeros(3, 2)
    p = torch.tensor([[0.0, 0.1], [0.5, 0.5], [9.0, 0.0]])
    mask = torch.tensor([[True, True], [True, True], [False, True]])
    errors = sequence_errors(g, p, mask)
    assert int(errors.argmax()) == 1
    assert errors.tolist() == pytest.approx([(1 + math.exp(0.1)) / 2, math.exp(0.5), 1.0], rel=1e-6)
