"""Rollout correction: hand examples, a NumPy oracle over all modes and rules, and planted defects."""

import itertools
import math

import numpy as np
import pytest
import torch

from fp8rl.learner.correction import correct, importance_weights, log_ratios
from fp8rl.learner.layout import Layout
from fp8rl.learner.loss import Denominators, policy_loss
from fp8rl.recipe.objective import (
    Correction,
    CorrectionMode,
    Estimator,
    Level,
    Objective,
    Rejection,
)
from tests import objective_oracle as oracle

MODES = [mode.value for mode in CorrectionMode]


def inputs(seed=0, rows=6, columns=9, spread=0.4):
    generator = np.random.default_rng(seed)
    g = -generator.random((rows, columns)) * 3
    p = g + generator.normal(size=(rows, columns)) * spread
    mask = generator.random((rows, columns)) > 0.3
    mask[1] = False  # a sequence without a token
    mask[2] = np.arange(columns) == 4
    return tuple(torch.from_numpy(x) for x in (p, g, mask))


def rule(by, level, high, low=None):
    return Rejection(by=by, level=level, high=high, low=low)


def expected(p, g, mask, mode="token", how="truncate", low=None, high=2.0, rules=(), normalise=False):
    """(weights, kept) by the oracle."""
    p, g, mask = (x.numpy() for x in (p, g, mask))
    weights, kept = np.zeros(p.shape), np.zeros(p.shape, bool)
    for b in range(len(p)):
        places = np.flatnonzero(mask[b])
        logs = [p[b, t] - g[b, t] for t in places]
        for n, t in enumerate(places):
            raw = oracle.weight(logs, n, mode)
            weights[b, t] = raw if mode == "off" else oracle.bound(raw, how, low, high)
            kept[b, t] = all(oracle.kept(logs, n, r.by, r.level, r.low, r.high) for r in rules)
    if normalise:
        if mode == "token":
            mean = weights[kept].mean()
        else:
            mean = np.mean([weights[b][kept[b]].mean() for b in range(len(p)) if kept[b].any()])
        weights = weights / mean
    return np.where(kept, weights, 0.0), kept


def test_truncated_importance_weights_by_hand():
    p = torch.tensor([[0.0, -1.0, -1.0, 30.0]])
    g = torch.tensor([[-0.1, -1.5, 0.0, -30.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    got = importance_weights(p, g, mask, Correction(truncate=1.5))
    np.testing.assert_allclose(got[0].numpy(), [math.exp(0.1), 1.5, math.exp(-1), 1.5], rtol=1e-6)
    low = importance_weights(p, g, mask, Correction(truncate=1.5, truncate_low=0.5))
    np.testing.assert_allclose(low[0].numpy(), [math.exp(0.1), 1.5, 0.5, 1.5], rtol=1e-6)
    off = importance_weights(p, g, mask, Correction(mode="off"))
    assert off.tolist() == [[1.0] * 4]


def test_sequence_and_geometric_weights_by_hand():
    """Log-ratios 0.1 and 0.3: their sum 0.4, their mean 0.2; the third token is not of the response."""
    g = torch.zeros(1, 3, dtype=torch.float64)
    p = torch.tensor([[0.1, 0.3, 5.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False]])
    for mode, want in (("sequence", math.exp(0.4)), ("geometric", math.exp(0.2))):
        got = correct(p, g, mask, Correction(mode=mode)).weights
        np.testing.assert_allclose(got[0].numpy(), [want, want, 0.0], rtol=1e-14)


def test_token_log_ratios_are_clamped_first_and_their_sum_again():
    g = torch.zeros(1, 3, dtype=torch.float64)
    p = torch.tensor([[-30.0, 5.0, 0.0]], dtype=torch.float64)
    mask = torch.ones(1, 3, dtype=torch.bool)
    got = correct(p, g, mask, Correction(mode="sequence")).weights
    assert got[0, 0].item() == pytest.approx(math.exp(-15.0), rel=1e-12)
    many = importance_weights(p - 30, g, mask, Correction(mode="sequence"))
    assert many[0, 0].item() == pytest.approx(math.exp(-20.0), rel=1e-12)


def test_icepop_by_hand_keeps_zeroed_tokens_in_the_denominator():
    """Ratios 0.4, 0.5, 1, 5, 5.1 with bounds (0.5, 5), which are included: the outer two become 0."""
    ratios = torch.tensor([[0.4, 0.5, 1.0, 5.0, 5.1]], dtype=torch.float64)
    g = torch.zeros_like(ratios)
    mask = torch.ones(1, 5, dtype=torch.bool)
    p = ratios.log()
    p[0, 1], p[0, 3] = math.log(0.5) + 1e-12, math.log(5.0) - 1e-12
    got = correct(p, g, mask, Correction(bound="icepop"))
    np.testing.assert_allclose(got.weights[0].numpy(), [0, 0.5, 1, 5, 0], rtol=1e-9)
    assert torch.equal(got.mask, mask)
    assert Denominators.of(got.mask).tokens == 5
    assert got.metrics["share_above"] == got.metrics["share_below"] == 0.2


def test_bounds_act_on_the_ratio_itself_not_on_its_inverse():
    """With [0.6, 1.4]: 0.65 is kept, and 1.5 and 1.65 (whose inverses lie within) are not."""
    ratios = torch.tensor([[0.65, 1.5, 1.65, 1.0, 0.55]], dtype=torch.float64)
    got = correct(
        ratios.log(),
        torch.zeros_like(ratios),
        torch.ones(1, 5, dtype=torch.bool),
        Correction(reject=(rule("k1", "token", 1.4, 0.6),)),
    )
    assert got.mask.tolist() == [[True, False, False, True, False]]
    assert got.metrics["rejected_token_k1"] == pytest.approx(0.6)


def test_rejected_tokens_leave_the_denominator():
    """One of four tokens is rejected: the mean is over three, and 4 as denominator is a defect."""
    g = torch.zeros(2, 2, dtype=torch.float64)
    p = torch.tensor([[0.0, 3.0], [0.0, 0.0]], dtype=torch.float64)
    mask = torch.ones(2, 2, dtype=torch.bool)
    got = correct(p, g, mask, Correction(mode="off", reject=(rule("k1", "token", 2.0),)))
    ones = torch.ones(2, dtype=torch.float64)

    def value(denominators):
        return policy_loss(
            p, p, ones, got.weights, got.mask, Objective(), denominators=denominators
        ).loss.item()

    assert Denominators.of(got.mask) == Denominators(tokens=3, sequences=2)
    assert value(Denominators.of(got.mask)) == pytest.approx(-1.0)
    assert value(Denominators.of(mask)) == pytest.approx(-0.75)


def test_a_rejected_sequence_leaves_the_number_of_sequences():
    g = torch.zeros(3, 2, dtype=torch.float64)
    p = torch.tensor([[0.0, 0.1], [3.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    mask = torch.ones(3, 2, dtype=torch.bool)
    for level, high in (("sequence_sum", 2.0), ("sequence_mean", 2.0)):
        got = correct(p, g, mask, Correction(reject=(rule("k1", level, high),)))
        assert got.mask.tolist() == [[True, True], [False, False], [True, True]]
        assert Denominators.of(got.mask) == Denominators(tokens=4, sequences=2)
        assert got.metrics["kept_sequences"] == pytest.approx(2 / 3)
        assert got.metrics["kept_tokens"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "bounds", [{}, {"truncate_low": 0.7}, {"bound": "icepop", "icepop": (0.7, 1.5)}]
)
@pytest.mark.parametrize("normalise", [False, True])
def test_weights_equal_the_oracle(mode, bounds, normalise):
    p, g, mask = inputs()
    correction = Correction(mode=mode, truncate=1.3, normalise=normalise, **bounds)
    got = correct(p, g, mask, correction)
    how = bounds.get("bound", "truncate")
    low, high = bounds.get("icepop", (bounds.get("truncate_low"), 1.3))
    want, _ = expected(p, g, mask, mode, how, low, high, normalise=normalise and mode != "off")
    np.testing.assert_allclose(got.weights.numpy(), want, rtol=1e-12)
    assert torch.equal(got.mask, mask)
    applied = want[mask.numpy()]
    assert got.metrics["weight_mean"] == pytest.approx(applied.mean())
    assert got.metrics["weight_std"] == pytest.approx(applied.std(), abs=1e-12)
    assert got.metrics["weight_max"] == pytest.approx(applied.max())
    assert got.metrics["weight_ess"] == pytest.approx(applied.mean() ** 2 / (applied**2).mean())


RULES = [
    rule(by, level, high)
    for by, level, high in itertools.product(
        Estimator,
        Level,
        (0.05, 0.3, 1.2, 1.6),
    )
    if (by is Estimator.K1) == (high > 1) and (by, level) != (Estimator.K1, Level.SEQUENCE_MAX)
]


@pytest.mark.parametrize("one", RULES, ids=lambda r: f"{r.by}-{r.level}-{r.high}")
def test_each_rejection_equals_the_oracle(one):
    p, g, mask = inputs(seed=3)
    got = correct(p, g, mask, Correction(mode="token", reject=(one,)))
    want, kept = expected(p, g, mask, rules=(one,))
    assert got.mask.tolist() == kept.tolist()
    np.testing.assert_allclose(got.weights.numpy(), want, rtol=1e-12)
    share = 1 - kept.sum() / mask.sum().item()
    assert got.metrics[f"rejected_{one.level}_{one.by}"] == pytest.approx(share)


def test_combined_rules_all_hold_and_their_order_does_not_matter():
    p, g, mask = inputs(seed=5)
    rules = (
        rule("k1", "token", 1.6),
        rule("k3", "sequence_mean", 0.09),
        rule("k2", "sequence_max", 0.9),
    )
    options = {"mode": "sequence", "normalise": True}
    got = correct(p, g, mask, Correction(reject=rules, **options))
    want, kept = expected(p, g, mask, "sequence", rules=rules, normalise=True)
    assert 0 < kept.sum() < mask.sum()
    assert got.mask.tolist() == kept.tolist()
    np.testing.assert_allclose(got.weights.numpy(), want, rtol=1e-12)
    for single in rules:
        assert (correct(p, g, mask, Correction(reject=(single,))).mask | ~got.mask).all()
    for order in itertools.permutations(rules):
        again = correct(p, g, mask, Correction(reject=order, **options))
        assert torch.equal(again.mask, got.mask)
        assert torch.equal(again.weights, got.weights)


def test_normalised_weights_have_mean_one_over_what_is_kept():
    p, g, mask = inputs(seed=2)
    got = correct(p, g, mask, Correction(normalise=True, reject=(rule("k1", "token", 1.5),)))
    assert got.weights[got.mask].mean().item() == pytest.approx(1.0, rel=1e-12)
    assert got.metrics["normaliser"] != 1.0


def test_nothing_carries_a_gradient_and_nothing_outside_the_mask_matters():
    p, g, mask = inputs()
    correction = Correction(mode="sequence", normalise=True, reject=(rule("k3", "sequence_max", 0.5),))
    clean = correct(p, g, mask, correction)
    p = torch.where(mask, p, math.nan).requires_grad_()
    g = torch.where(mask, g, math.inf)
    dirty = correct(p, g, mask, correction)
    assert not dirty.weights.requires_grad
    assert torch.equal(clean.weights, dirty.weights)
    assert torch.equal(clean.mask, dirty.mask)


def test_a_nan_log_prob_is_never_kept_by_a_rule():
    p, g, mask = inputs()
    p[0, int(mask[0].nonzero()[0])] = math.nan
    for level in Level:
        one = rule("k3", level, 1e9)
        got = correct(p, g, mask, Correction(reject=(one,)))
        segments = torch.arange(6)[:, None].expand(6, 9)
        packed = correct(p, g, mask, Correction(reject=(one,)), Layout.packed(segments))
        assert torch.equal(packed.mask, got.mask)
        if level is Level.TOKEN:
            assert int(got.mask.sum()) == int(mask.sum()) - 1
        else:
            assert not got.mask[0].any()
        assert torch.isfinite(got.weights).all()


@pytest.mark.parametrize("mode", MODES)
def test_parts_of_a_batch_padding_and_order_do_not_matter(mode):
    """What needs no whole batch: weights and rejection of a sequence are its own."""
    p, g, mask = inputs()
    correction = Correction(mode=mode, reject=(rule("k1", "sequence_mean", 1.2),))
    whole = correct(p, g, mask, correction)
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = correct(p[rows], g[rows], mask[rows], correction)
        assert torch.equal(part.mask, whole.mask[rows])
        torch.testing.assert_close(part.weights, whole.weights[rows], rtol=1e-14, atol=0)
    for sides in ((0, 4), (3, 0)):
        wide = correct(*(torch.nn.functional.pad(x, sides) for x in (p, g, mask)), correction)
        columns = slice(sides[0], sides[0] + 9)
        assert torch.equal(wide.mask[:, columns], whole.mask)
        torch.testing.assert_close(wide.weights[:, columns], whole.weights, rtol=1e-14, atol=0)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    mixed = correct(p[order], g[order], mask[order], correction)
    assert torch.equal(mixed.mask, whole.mask[order])


@pytest.mark.parametrize("mode", MODES)
def test_packed_rows_give_what_padded_rows_give(mode):
    p, g, mask = inputs()
    rules = tuple(
        rule("k3", level, 0.3) if level is Level.SEQUENCE_MAX else rule("k1", level, 1.5)
        for level in Level
    )
    correction = Correction(mode=mode, normalise=mode != "off", reject=rules)
    whole = correct(p, g, mask, correction)
    segments = torch.arange(6)[:, None].expand(6, 9).reshape(2, 27)
    packed = correct(*(x.reshape(2, 27) for x in (p, g, mask)), correction, Layout.packed(segments))
    assert torch.equal(packed.mask.reshape(6, 9), whole.mask)
    torch.testing.assert_close(packed.weights.reshape(6, 9), whole.weights, rtol=1e-13, atol=0)
    assert packed.metrics == pytest.approx(whole.metrics)


def test_a_batch_of_nothing_is_counted_not_divided_by():
    p, g, mask = inputs()
    got = correct(p, g, torch.zeros_like(mask), Correction(normalise=True))
    assert not got.weights.any()
    assert not got.mask.any()
    assert got.metrics["kept_tokens"] == got.metrics["kept_sequences"] == 0
    assert all(math.isfinite(value) for value in got.metrics.values())
    all_rejected = correct(
        p + 9, g, mask, Correction(normalise=True, reject=(rule("k1", "token", 2.0),))
    )
    assert all_rejected.metrics["kept_tokens"] == 0
    assert all_rejected.metrics["rejected_token_k1"] == 1
    assert Denominators.of(all_rejected.mask).empty
    zeroed = correct(p + 9, g, mask, Correction(bound="icepop", normalise=True))
    assert not zeroed.weights.any()
    assert zeroed.metrics["weight_ess"] == 0


def test_off_by_one_tokens_show_in_the_weights():
    """A planted defect: rollout log-probs shifted by one place are not those of the same tokens."""
    p, _, mask = inputs()
    g = p.clone()
    assert importance_weights(p, g, mask, Correction()).eq(1).all()
    assert (log_ratios(p, g.roll(1, 1), mask).abs() > 0.05).any()
