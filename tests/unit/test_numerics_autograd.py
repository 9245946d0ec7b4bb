"""The FP8 linear under autocast and checkpointing, and when its weight is quantised again."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fp8rl.numerics import linear
from fp8rl.numerics.linear import fp8_linear
from fp8rl.numerics.quantise import quantise
from tests import oracle
from tests.unit.test_numerics import ieee  # noqa: F401 (a fixture of this module too)
from tests.unit.test_numerics_linear import BACKENDS, FUSED, ONE, Layer

# --- autograd


@pytest.mark.parametrize("name", BACKENDS)
def test_autocast_gives_what_a_cast_activation_gives(name):
    layer = Layer(FUSED, backend=name)
    x, dy = layer.batch(129)
    want = layer.run(x.bfloat16(), dy.bfloat16())
    x.requires_grad_()
    for backward_inside in (False, True):
        x.grad = layer.weight.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            y = fp8_linear(x, layer.weight, layer.fp8)
            if backward_inside:
                y.backward(dy.bfloat16())
        if not backward_inside:
            y.backward(dy.bfloat16())
        assert y.dtype is torch.bfloat16
        assert torch.equal(y, want["y"])
        assert torch.equal(x.grad, want["dx"].float())
        assert layer.weight.grad.dtype is torch.float32
        assert torch.equal(layer.weight.grad, want["dw"])


class Counted:
    """Counts how often a weight is quantised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0

        def counting(*args, **kwargs):
            self.count += 1
            return quantise(*args, **kwargs)

        monkeypatch.setattr(linear, "quantise", counting)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", BACKENDS)
def test_checkpointed_layer_has_the_same_bits_and_quantises_its_weight_once(
    name, reentrant, monkeypatch
):
    counted = Counted(monkeypatch)
    layer = Layer(FUSED, backend=name)
    x, dy = layer.batch(129)
    want = layer.run(x, dy)
    x.requires_grad_()
    for _ in range(2):
        x.grad = layer.weight.grad = None
        y = checkpoint(lambda x: fp8_linear(x, layer.weight, layer.fp8), x, use_reentrant=reentrant)
        y.backward(dy)
        assert torch.equal(y, want["y"])
        assert torch.equal(x.grad, want["dx"])
        assert torch.equal(layer.weight.grad, want["dw"])
    assert counted.count == len(FUSED)


def test_weight_changed_between_forward_and_backward_is_refused():
    layer = Layer(ONE)
    x, dy = layer.batch(3)
    y = fp8_linear(x, layer.weight, layer.fp8)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


# --- the quantised weight


def test_weight_is_quantised_once_per_version(monkeypatch):
    counted = Counted(monkeypatch)
    layer = Layer(FUSED)
    first = layer.fp8.prepared(layer.weight)
    for _ in range(3):
        layer.run(*layer.batch(5))  # gradient accumulation
    assert layer.fp8.prepared(layer.weight) is first
    assert counted.count == len(FUSED)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(layer.fp8.prepared(layer.weight).fused, first.fused * 2)
    assert counted.count == 2 * len(FUSED)


def test_quantised_weight_is_that_of_each_projection():
    layer = Layer(FUSED)
    for name, part in zip(layer.projections.names, layer.parts, strict=True):
        codes, scales = oracle.quantise_weight(part.numpy())
        got = layer.fp8.quantised(layer.weight)[name]
        np.testing.assert_array_equal(got.codes.numpy(), codes)
        np.testing.assert_array_equal(got.scale_inv.numpy(), scales)


@pytest.mark.parametrize("foreach", [True, False])
def test_optimiser_step_refreshes_the_quantised_weight(foreach):
    layer = Layer(ONE)
    before = layer.fp8.prepared(layer.weight).fused.clone()
    optimiser = torch.optim.AdamW([layer.weight], lr=0.1, foreach=foreach)
    x, dy = layer.batch(4)
    layer.run(x, dy)
    optimiser.step()
    after = layer.fp8.prepared(layer.weight).fused
    assert not torch.equal(after, before)
    assert torch.equal(after, quantise(layer.weight, layer.recipe.weight).dequantise())


def test_another_weight_in_the_same_memory_is_not_taken_for_the_old_one():
    """A parameter that replaces another may get its id and version."""
    layer = Layer((8,))
    for value in range(1, 500):
        weight = torch.full((8, 200), float(value))
        assert layer.fp8.prepared(weight).fused[0, 0].item() == pytest.approx(value, rel=1e-6)
        del weight
