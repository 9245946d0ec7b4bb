"""Advantages, log-probs, correction, loss and mismatch: hand examples and NumPy float64 oracles."""

import math

import numpy as np
import pytest
import torch

from fp8rl.learner.advantage import grpo_advantages
from fp8rl.learner.batch import LogprobError, make_batch
from fp8rl.learner.correction import importance_weights
from fp8rl.learner.logprobs import token_logprobs
from fp8rl.learner.loss import clipped_policy_loss
from fp8rl.mismatch import mismatch_panel
from fp8rl.recipe.schema import Correction, CorrectionMode


def test_grpo_advantage_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    groups = torch.tensor([7, 7, 7, 3, 3, 3])
    got = grpo_advantages(rewards, groups)
    std = math.sqrt(((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2)
    want = [(2 / 3) / (std + 1e-6), (-1 / 3) / (std + 1e-6), (-1 / 3) / (std + 1e-6), 0, 0, 0]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-12)


def test_equal_rewards_give_exactly_zero():
    rewards = torch.full((7,), 0.1, dtype=torch.float32)
    assert grpo_advantages(rewards, torch.zeros(7, dtype=torch.int64)).tolist() == [0.0] * 7


def test_advantages_do_not_depend_on_the_order_of_samples():
    torch.manual_seed(0)
    rewards, groups = torch.rand(24, dtype=torch.float64), torch.arange(24) % 6
    order = torch.randperm(24)
    got = grpo_advantages(rewards[order], groups[order])
    torch.testing.assert_close(got, grpo_advantages(rewards, groups)[order], rtol=1e-12, atol=0)


def test_group_of_one_and_non_finite_rewards_are_refused():
    with pytest.raises(ValueError, match="single sample"):
        grpo_advantages(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]))
    with pytest.raises(ValueError, match="NaN"):
        grpo_advantages(torch.tensor([1.0, math.nan]), torch.tensor([0, 0]))


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_logprob_is_of_the_next_token_after_temperature(temperature):
    torch.manual_seed(0)
    logits, tokens = torch.randn(2, 4, 5), torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
    logp, entropy = token_logprobs(logits, tokens, temperature)
    for b in range(2):
        for j in range(3):
            z = logits[b, j].double().numpy() / temperature
            p = np.exp(z) / np.exp(z).sum()
            assert logp[b, j].item() == pytest.approx(math.log(p[tokens[b, j + 1]]), abs=1e-5)
            assert entropy[b, j].item() == pytest.approx(-(p * np.log(p)).sum(), abs=1e-5)


def test_mask_marks_the_positions_that_predict_response_tokens():
    batch = make_batch([[5, 6], [5]], [[7, 8], [9]], [[-1.0, -2.0], [-3.0]])
    assert batch.tokens.tolist() == [[5, 6, 7, 8], [5, 9, 0, 0]]
    assert batch.mask.tolist() == [[False, True, True], [True, False, False]]
    assert batch.g.tolist() == [[0.0, -1.0, -2.0], [-3.0, 0.0, 0.0]]
    predicted = batch.tokens[:, 1:][batch.mask]
    assert predicted.tolist() == [7, 8, 9]
    assert batch.valid.sum(1).tolist() == [4, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_rollout_logprob_is_an_error_never_zero(bad):
    with pytest.raises(LogprobError, match=r"samples \[1\]"):
        make_batch([[1], [1]], [[2], [3]], [[-1.0], [bad]])
    with pytest.raises(LogprobError, match="1 log-probs for 2 tokens"):
        make_batch([[1]], [[2, 3]], [[-1.0]])
    with pytest.raises(ValueError, match="empty response"):
        make_batch([[1]], [[]], [[]])


def test_truncated_importance_weights_by_hand():
    p = torch.tensor([[0.0, -1.0, -1.0, 30.0]])
    g = torch.tensor([[-0.1, -1.5, 0.0, -30.0]])
    got = importance_weights(p, g, Correction(truncate=1.5))
    want = [math.exp(0.1), 1.5, math.exp(-1), 1.5]
    np.testing.assert_allclose(got[0].numpy(), want, rtol=1e-6)
    off = importance_weights(p, g, Correction(mode=CorrectionMode.OFF))
    assert off.tolist() == [[1.0] * 4]


def loss_oracle(c, p, advantages, w, mask, tokens, low, high):
    total = 0.0
    for b in range(c.shape[0]):
        for t in range(c.shape[1]):
            if mask[b, t]:
                r = math.exp(c[b, t] - p[b, t])
                a = advantages[b]
                total += w[b, t] * min(r * a, min(max(r, 1 - low), 1 + high) * a)
    return -total / tokens


def random_loss_inputs(seed=0, rows=4, columns=6):
    g = torch.Generator().manual_seed(seed)
    c = -torch.rand(rows, columns, generator=g, dtype=torch.float64) * 3
    p = c + torch.randn(rows, columns, generator=g, dtype=torch.float64) * 0.3
    mask = torch.rand(rows, columns, generator=g) > 0.3
    advantages = torch.randn(rows, generator=g, dtype=torch.float64)
    w = torch.rand(rows, columns, generator=g, dtype=torch.float64) * 2
    return c, p, advantages, w, mask


def test_loss_equals_oracle_and_gradient_equals_finite_differences():
    c, p, advantages, w, mask = random_loss_inputs()
    tokens = int(mask.sum())
    c.requires_grad_()
    options = {"tokens": tokens, "clip_low": 0.2, "clip_high": 0.3}
    out = clipped_policy_loss(c, p, advantages, w, mask, **options)
    want = loss_oracle(
        c.detach().numpy(), p.numpy(), advantages.numpy(), w.numpy(), mask.numpy(), tokens, 0.2, 0.3
    )
    assert out.loss.item() == pytest.approx(want, rel=1e-12)
    assert int(out.clipped) > 0
    assert torch.autograd.gradcheck(
        lambda x: clipped_policy_loss(x, p, advantages, w, mask, **options).loss, (c,)
    )


def test_gradient_does_not_depend_on_micro_batches_or_padding():
    c, p, advantages, w, mask = random_loss_inputs(rows=6)
    tokens = int(mask.sum())
    options = {"tokens": tokens, "clip_low": 0.2, "clip_high": 0.2}
    whole = c.clone().requires_grad_()
    clipped_policy_loss(whole, p, advantages, w, mask, **options).loss.backward()
    parts = c.clone().requires_grad_()
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        clipped_policy_loss(
            parts[rows], p[rows], advantages[rows], w[rows], mask[rows], **options
        ).loss.backward()
    torch.testing.assert_close(whole.grad, parts.grad, rtol=1e-12, atol=0)

    def pad(x):
        return torch.nn.functional.pad(x, (0, 3))

    wide = pad(c).requires_grad_()
    clipped_policy_loss(wide, pad(p), advantages, pad(w), pad(mask), **options).loss.backward()
    torch.testing.assert_close(wide.grad[:, :6], whole.grad, rtol=1e-12, atol=0)


def test_nan_outside_the_mask_does_not_reach_the_loss():
    c, p, advantages, w, mask = random_loss_inputs()
    clean = clipped_policy_loss(c, p, advantages, w, mask, tokens=9, clip_low=0.2, clip_high=0.2)
    c = torch.where(mask, c, math.nan)
    dirty = clipped_policy_loss(c, p, advantages, w, mask, tokens=9, clip_low=0.2, clip_high=0.2)
    assert torch.equal(clean.loss, dirty.loss)


def test_mismatch_panel_equals_a_float64_oracle():
    generator = np.random.default_rng(0)
    g = -generator.random((5, 9)) * 3
    p = g + generator.normal(size=(5, 9)) * 0.2
    mask = generator.random((5, 9)) > 0.4
    panel = mismatch_panel(
        torch.from_numpy(g).float(), torch.from_numpy(p).float(), torch.from_numpy(mask), truncate=1.2
    )
    g, p = g.astype(np.float32).astype(np.float64), p.astype(np.float32).astype(np.float64)
    gt, pt = g[mask], p[mask]
    ratio = np.exp(pt - gt)
    m = np.log((np.exp(pt) + np.exp(gt)) / 2)
    k3 = lambda x: np.exp(x) - 1 - x  # noqa: E731
    rows = [np.mean((g - p)[b][mask[b]]) for b in range(5)]
    want = {
        "token_mult_prob_error": np.mean(np.exp(np.abs(gt - pt))),
        "token_mult_prob_error_p50": np.quantile(np.exp(np.abs(gt - pt)), 0.5),
        "token_mult_prob_error_p99": np.quantile(np.exp(np.abs(gt - pt)), 0.99),
        "token_mult_prob_error_max": np.exp(np.abs(gt - pt)).max(),
        "kl_k1": np.mean(gt - pt),
        "kl_k3": np.mean(k3(pt - gt)),
        "js_divergence": np.mean((k3(pt - m) + k3(gt - m)) / 2),
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "ess": 1 / np.mean((ratio / ratio.mean()) ** 2),
        "out_of_bounds": np.mean((ratio > 1.2) | (ratio < 1 / 1.2)),
        "ppl_difference": np.mean(rows),
        "nan_count": 0,
    }
    assert panel.keys() == want.keys()
    for name, value in want.items():
        assert panel[name] == pytest.approx(value, rel=1e-6, abs=1e-7), name


def test_mismatch_is_one_for_equal_logprobs_and_nan_for_nan():
    g = -torch.rand(2, 3)
    mask = torch.ones(2, 3, dtype=torch.bool)
    panel = mismatch_panel(g, g.clone(), mask, truncate=2)
    assert panel["token_mult_prob_error"] == 1.0
    assert panel["kl_k3"] == panel["js_divergence"] == 0.0
    assert panel["ess"] == 1.0
    p = g.clone()
    p[0, 0] = math.nan
    panel = mismatch_panel(g, p, mask, truncate=2)
    assert panel["nan_count"] == 1
    assert math.isnan(panel["token_mult_prob_error"])
    with pytest.raises(ValueError, match="no response token"):
        mismatch_panel(g, p, ~mask, truncate=2)
