"""Policy losses, aggregation and KL: hand examples, an oracle, finite differences, planted defects."""

import math

import numpy as np
import pytest
import torch

from fp8rl.learner.kl import kl_penalty, kl_values
from fp8rl.learner.layout import Layout
from fp8rl.learner.loss import Denominators, aggregate, policy_loss
from fp8rl.recipe.objective import Aggregation, Estimator, LossKind, Objective
from tests import objective_oracle as oracle

KINDS, WAYS = [k.value for k in LossKind], [a.value for a in Aggregation]
LENGTH = 5


def inputs(seed=0, rows=6, columns=7):
    generator = np.random.default_rng(seed)
    c = -generator.random((rows, columns)) * 3
    p = c + generator.normal(size=c.shape) * 0.4
    mask = generator.random(c.shape) > 0.3
    mask[1] = False  # a sequence without a token
    advantages = generator.normal(size=rows)
    advantages[3:] *= -1
    weights = generator.random(c.shape) * 2
    return c, p, advantages, weights, mask


def tensors(*arrays):
    return tuple(torch.from_numpy(np.array(x)) for x in arrays)


def run(c, p, a, w, mask, options, denominators=None, layout=None):
    denominators = denominators or Denominators.of(mask, layout)
    return policy_loss(
        c, p, a, w, mask, options, denominators=denominators, length=LENGTH, layout=layout
    )


def clips(options):
    dual = options.dual_clip if options.loss in ("clipped", "gspo") else None
    return {"low": options.clip_low, "high": options.clip_high, "dual": dual}


def options_of(kind, how="token_mean", **more):
    return Objective(loss=kind, aggregation=how, clip_low=0.1, clip_high=0.3, **more)


def test_clipped_loss_by_hand():
    """Ratios 1.5, 0.5 for A = 1 and again for A = -1, bounds 0.8 and 1.3."""
    c = torch.tensor([[1.5, 0.5], [1.5, 0.5]], dtype=torch.float64).log()
    p, mask = torch.zeros_like(c), torch.ones(2, 2, dtype=torch.bool)
    a, w = torch.tensor([1.0, -1.0], dtype=torch.float64), torch.ones_like(c)
    got = run(c, p, a, w, mask, Objective(clip_high=0.3))
    assert got.loss.item() == pytest.approx(-(1.3 + 0.5 - 1.5 - 0.8) / 4, rel=1e-12)
    assert (got.clipped_low, got.clipped_high, got.clipped_dual) == (1, 1, 0)
    got = run(c, p, a, w, mask, Objective(clip_high=0.3, dual_clip=1.2))
    assert got.loss.item() == pytest.approx(-(1.3 + 0.5 - 1.2 - 0.8) / 4, rel=1e-12)
    assert got.clipped_dual == 1


def test_other_losses_by_hand():
    """Ratios 2 and 8: GSPO's is their geometric mean 4; A = 3."""
    c = torch.tensor([[2.0, 8.0]], dtype=torch.float64).log() - 5
    p, mask = torch.full_like(c, -5), torch.ones(1, 2, dtype=torch.bool)
    a, w = torch.tensor([3.0], dtype=torch.float64), torch.ones_like(c)

    def value(**choice):
        return run(c, p, a, w, mask, Objective(**choice)).loss.item()

    mean = {"aggregation": "sequence_mean_token_mean"}
    assert value(loss="gspo", clip_high=9, **mean) == pytest.approx(-12.0)
    assert value(loss="gspo", clip_high=0.5, **mean) == pytest.approx(-4.5)
    logs = math.log(2) - 5, math.log(8) - 5
    assert value(loss="cispo", clip_high=2) == pytest.approx(-3 * (2 * logs[0] + 3 * logs[1]) / 2)
    assert value(loss="reinforce") == pytest.approx(-3 * sum(logs) / 2)


def test_aggregations_by_hand():
    """Sequences of 1 and 3 tokens, sums 4 and 6, and one without a token."""
    values = torch.tensor([[4.0, 0, 0], [1.0, 2.0, 3.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[True, False, False], [True] * 3, [False] * 3])
    want = {
        "token_mean": 10 / 4,
        "token_sum": 10,
        "sequence_mean_token_mean": (4 + 2) / 2,
        "sequence_mean_token_sum": 10 / 2,
        "constant_length": 10 / 2 / 5,
    }
    for how in Aggregation:
        got = aggregate(values, mask, how, Denominators.of(mask), length=5)
        assert got.item() == pytest.approx(want[how])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("dual", [None, 1.1])
def test_equals_the_oracle_and_gradient_equals_finite_differences(kind, how, dual):
    c, p, a, w, mask = inputs()
    options = options_of(kind, how, dual_clip=dual)
    c_T, *rest = tensors(c, p, a, w, mask)
    c_T.requires_grad_()
    out = run(c_T, *rest, options)
    out.loss.backward()

    def value(at):
        return oracle.loss(kind, at, p, a, w, mask, how=how, length=LENGTH, fixed=c, **clips(options))

    assert out.loss.item() == pytest.approx(value(c), rel=1e-12)
    if kind == "gspo" and how != "sequence_mean_token_mean":
        return  # refused by the rules: the token form has another gradient there
    if kind == "gspo":  # one weight for a sequence: with token weights there is no sequence form
        w = np.repeat(w[:, :1], c.shape[1], 1)
        c_T.grad = None
        run(c_T, *tensors(p, a, w, mask), options).loss.backward()
    step = 1e-6
    for place in np.ndindex(c.shape):
        up, down = c.copy(), c.copy()
        up[place] += step
        down[place] -= step
        slope = (value(up) - value(down)) / (2 * step)
        assert c_T.grad[place].item() == pytest.approx(slope, abs=1e-8), place


def test_what_was_clipped_is_counted_and_the_ratio_is_the_raw_one():
    """Ratios clipped before they are logged cannot exceed the bounds: that defect is seen here."""
    c, p, a, w, mask = inputs()
    ratio = np.exp(c - p)[mask]
    assert ratio.max() > 1.3
    sign = np.repeat(a[:, None], c.shape[1], 1)[mask]
    for kind in ("clipped", "cispo", "reinforce"):
        out = run(*tensors(c, p, a, w, mask), options_of(kind))
        assert out.ratio_max == pytest.approx(ratio.max(), rel=1e-12)
        assert out.ratio_sum == pytest.approx(ratio.sum(), rel=1e-12)
        if kind == "clipped":
            assert out.clipped_low == ((ratio < 0.9) & (sign < 0)).sum() > 0
            assert out.clipped_high == ((ratio > 1.3) & (sign > 0)).sum() > 0
        elif kind == "cispo":
            assert out.clipped_low + out.clipped_high == ((ratio < 0.9) | (ratio > 1.3)).sum()
        else:
            assert out.clipped_low == out.clipped_high == 0


def test_cispo_keeps_the_gradient_of_clipped_tokens_and_ppo_does_not():
    c = torch.tensor([[2.0]], dtype=torch.float64).log().requires_grad_()
    one, mask = torch.ones(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    gradients = {}
    for kind in ("clipped", "cispo"):
        c.grad = None
        run(c, torch.zeros(1, 1), one, one[:, None], mask, options_of(kind)).loss.backward()
        gradients[kind] = c.grad.item()
    assert gradients == {"clipped": 0.0, "cispo": pytest.approx(-1.3)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", WAYS)
def test_gradient_does_not_depend_on_micro_batches_padding_order_or_packing(kind, how):
    c, p, a, w, mask = tensors(*inputs())
    options = options_of(kind, how)
    denominators = Denominators.of(mask)

    def gradient(c, p, a, w, mask, parts=(slice(None),), layout=None):
        c = c.clone().requires_grad_()
        total = 0.0
        for rows in parts:
            out = run(c[rows], p[rows], a[rows], w[rows], mask[rows], options, denominators, layout)
            out.loss.backward()
            total += out.loss.item()
        return total, c.grad

    total, whole = gradient(c, p, a, w, mask)
    same = {"rtol": 1e-12, "atol": 1e-15}
    for parts in ([slice(0, 1), slice(1, 2), slice(2, 6)], [slice(i, i + 1) for i in range(6)]):
        value, got = gradient(c, p, a, w, mask, parts)
        assert value == pytest.approx(total, rel=1e-12)
        torch.testing.assert_close(got, whole, **same)
    for sides in ((0, 4), (3, 0), (2, 5)):  # padding on either side
        wide = [torch.nn.functional.pad(x, sides) for x in (c, p, w, mask)]
        value, got = gradient(wide[0], wide[1], a, wide[2], wide[3])
        assert value == pytest.approx(total, rel=1e-12)
        torch.testing.assert_close(got[:, sides[0] : sides[0] + 7], whole, **same)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(3))
    value, got = gradient(c[order], p[order], a[order], w[order], mask[order])
    assert value == pytest.approx(total, rel=1e-12)
    torch.testing.assert_close(got, whole[order], **same)
    segments = torch.arange(6)[:, None].expand(6, 7).reshape(2, 21)
    layout = Layout.packed(segments)
    packed = [x.reshape(2, 21) for x in (c, p, w, mask)]
    assert Denominators.of(packed[3], layout) == denominators
    c_packed = packed[0].clone().requires_grad_()
    out = run(c_packed, packed[1], a, packed[2], packed[3], options, denominators, layout)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(total, rel=1e-12)
    torch.testing.assert_close(c_packed.grad.reshape(6, 7), whole, **same)


def test_a_denominator_of_the_micro_batch_is_seen():
    """A planted defect: each part divided by its own tokens."""
    c, p, a, w, mask = tensors(*inputs())
    whole = run(c, p, a, w, mask, Objective()).loss.item()
    parts = [
        run(c[i : i + 3], p[i : i + 3], a[i : i + 3], w[i : i + 3], mask[i : i + 3], Objective())
        for i in (0, 3)
    ]
    assert sum(out.loss.item() for out in parts) / 2 != pytest.approx(whole, rel=1e-3)


def test_an_off_by_one_target_is_seen():
    """A planted defect: the mask one place to the left gives another loss and other gradients."""
    c, p, a, w, _ = tensors(*inputs())
    mask = torch.zeros_like(c, dtype=torch.bool)
    mask[:, 2:6] = True
    right, wrong = run(c, p, a, w, mask, Objective()), run(c, p, a, w, mask.roll(-1, 1), Objective())
    assert right.loss.item() != pytest.approx(wrong.loss.item(), rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", WAYS)
def test_nothing_outside_the_mask_reaches_loss_or_gradient(kind, how):
    c, p, a, w, mask = tensors(*inputs())
    options = options_of(kind, how, dual_clip=2.0)
    clean = c.clone().requires_grad_()
    run(clean, p, a, w, mask, options).loss.backward()
    for bad in (math.nan, math.inf, -math.inf):
        dirty = torch.where(mask, c, bad).requires_grad_()
        out = run(dirty, torch.where(mask, p, bad), a, torch.where(mask, w, bad), mask, options)
        out.loss.backward()
        assert torch.isfinite(out.loss)
        torch.testing.assert_close(dirty.grad, clean.grad, rtol=0, atol=0)
        assert math.isfinite(out.ratio_sum)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", WAYS)
def test_a_fully_masked_batch_gives_zero_and_a_flag(kind, how):
    c, p, a, w, mask = tensors(*inputs())
    mask = torch.zeros_like(mask)
    assert Denominators.of(mask).empty
    assert not Denominators.of(~mask).empty
    c = torch.full_like(c, math.nan).requires_grad_()
    out = run(c, p, a, w, mask, options_of(kind, how))
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert not c.grad.any()
    assert (out.clipped_low, out.clipped_high, out.clipped_dual, out.ratio_sum) == (0, 0, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_no_ratio_is_so_large_that_the_gradient_is_not_finite(kind):
    c = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    p = torch.tensor([[-200.0, -2.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    for advantage in (1.0, 0.0, -1.0):
        out = run(c, p, torch.tensor([advantage]), torch.ones(1, 2), mask, options_of(kind))
        out.loss.backward()
        assert torch.isfinite(out.loss)
    assert torch.isfinite(c.grad).all()


def test_the_default_objective_is_bit_for_bit_the_formula():
    """-(1 / N) sum of w min(r A, clip(r) A), written out as in the paper, forward and backward."""
    torch.manual_seed(1)
    c = (-torch.rand(16, 33) * 4).requires_grad_()
    p = c.detach() + torch.randn(16, 33) * 0.3
    mask, a, w = torch.rand(16, 33) > 0.4, torch.randn(16), torch.rand(16, 33) * 2
    loss = run(c, p, a, w, mask, Objective()).loss
    (got,) = torch.autograd.grad(loss, c)
    ratio = (c - p).exp()
    objective = torch.minimum(ratio * a[:, None], ratio.clamp(0.8, 1.2) * a[:, None]) * w
    plain = -torch.where(mask, objective, 0.0).sum() / int(mask.sum())
    (want,) = torch.autograd.grad(plain, c)
    assert torch.equal(loss, plain)
    assert torch.equal(got, want)


# --- KL to a reference


def test_kl_estimators_by_hand():
    c, ref = torch.tensor([[-1.0]]), torch.tensor([[-1.5]])
    want = {"k1": 0.5, "k2": 0.125, "k3": math.exp(-0.5) - 1 + 0.5}
    for by in Estimator:
        assert kl_values(c, ref, by).item() == pytest.approx(want[by], rel=1e-6)


@pytest.mark.parametrize("by", list(Estimator))
def test_kl_gradient_is_that_of_the_divergence(by):
    """In expectation over the policy's own tokens, exact over a vocabulary of five; the true gradient
    by finite differences of KL(policy || reference). The gradient of k3's value is another's."""
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(5, dtype=torch.float64).log_softmax(-1)
    mask = torch.ones(5, dtype=torch.bool)
    c = logits.log_softmax(-1)
    drawn = c.detach().exp()  # how often each token is drawn
    (got,) = torch.autograd.grad((drawn * kl_penalty(c, ref, mask, by)).sum(), logits)
    want = oracle.kl_gradient(logits.detach().numpy(), ref.numpy())
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-6, atol=1e-9)
    if by is not Estimator.K2:  # in expectation the value is the divergence too
        value = (drawn * kl_values(c, ref, by)).sum().item()
        assert value == pytest.approx((drawn * (c.detach() - ref)).sum().item(), rel=1e-12)
    if by is Estimator.K3:
        x = ref - logits.log_softmax(-1)
        (naive,) = torch.autograd.grad((drawn * (x.exp() - 1 - x)).sum(), logits)
        assert (naive - got).abs().max() > 1e-2


def test_kl_outside_the_mask_matters_neither_forward_nor_backward():
    c, _, _, _, mask = tensors(*inputs())
    dirty = torch.where(mask, c, math.nan).requires_grad_()
    ref = torch.where(mask, c - 0.3, math.inf)
    penalty = kl_penalty(dirty, ref, mask, Estimator.K3)
    penalty.sum().backward()
    assert torch.isfinite(penalty).all()
    torch.testing.assert_close(dirty.grad, mask.double() * 0.3, rtol=1e-12, atol=1e-15)
