"""FP8 numerics against an independent oracle."""

import numpy as np
import pytest
import torch

from fp8rl.numerics import compiled
from fp8rl.numerics.blockwise import (
    NonFiniteError,
    quantise_groups,
    quantise_weight,
    round_trip_groups,
    round_trip_tokens,
)
from fp8rl.numerics.e4m3 import decode_e4m3, encode_e4m3, round_to_e4m3
from fp8rl.numerics.linear import Fp8Weight, Projections, fp8_linear
from fp8rl.numerics.padding import pad_dim, padded_size
from tests import oracle

SHAPES = [(1, 1), (128, 128), (129, 127), (200, 300), (5, 640), (256, 64)]


def boundaries() -> torch.Tensor:
    """Every E4M3 value, every midpoint between two, and their FP32 neighbours."""
    values = np.array([oracle.value_of(c) for c in range(0x7F)], dtype=np.float32)
    middles = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    points = np.concatenate([values, middles])
    points = np.concatenate([points, np.nextafter(points, 1e9), np.nextafter(points, -1e9)])
    points = points[np.abs(points) <= 448]
    return torch.from_numpy(np.concatenate([points, -points]).astype(np.float32))


def test_rounding_equals_oracle_and_torch_cast_at_every_boundary():
    x = boundaries()
    codes = encode_e4m3(round_to_e4m3(x))
    np.testing.assert_array_equal(codes.numpy(), oracle.encode(x.numpy()))
    assert torch.equal(codes, x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_every_code_decodes_and_encodes_to_itself():
    codes = torch.from_numpy(oracle.FINITE_CODES.copy())
    values = decode_e4m3(codes)
    np.testing.assert_array_equal(values.numpy(), oracle.decode(codes.numpy()))
    assert torch.equal(encode_e4m3(values), codes)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_code_is_refused(code):
    with pytest.raises(ValueError, match="NaN code"):
        decode_e4m3(torch.tensor([0, code], dtype=torch.uint8))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_codes_and_scales_equal_oracle(shape, pow2, dtype):
    torch.manual_seed(0)
    w = (torch.randn(shape) * torch.exp2(torch.randint(-12, 6, shape).float())).to(dtype)
    got = quantise_weight(w, power_of_two=pow2)
    codes, scales = oracle.quantise_weight(w.float().numpy(), pow2=pow2)
    np.testing.assert_array_equal(got.codes.numpy(), codes)
    np.testing.assert_array_equal(got.scale_inv.numpy(), scales)
    exact = oracle.dequantise_weight(codes, scales)
    np.testing.assert_allclose(got.dequantise().numpy(), exact, rtol=2**-23)


def test_zero_block_has_scale_one_and_keeps_zeros():
    w = torch.zeros(130, 128)
    w[129, 3] = -0.0
    got = quantise_weight(w)
    assert got.scale_inv.unique().tolist() == [1.0]
    assert not got.dequantise().any()
    assert got.codes[129, 3] == 0x80  # the sign of zero is kept


def test_block_so_small_that_its_scale_overflows():
    w = torch.full((2, 2), 1e-38)
    codes, scales = oracle.quantise_weight(w.numpy())
    got = quantise_weight(w)
    np.testing.assert_array_equal(got.codes.numpy(), codes)
    np.testing.assert_array_equal(got.scale_inv.numpy(), scales)
    largest = torch.finfo(torch.bfloat16).max
    small = quantise_weight(w.bfloat16())
    assert small.scale_inv.item() == pytest.approx(1 / largest, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_input_is_refused_with_name_count_and_place(bad):
    w = torch.ones(3, 200)
    w[2, 150] = bad
    with pytest.raises(NonFiniteError, match=r"layer\.7: 1 of 600 values .* \(2, 150\)"):
        quantise_weight(w, name="layer.7")
    for quantise in (quantise_groups, round_trip_groups, round_trip_tokens):
        with pytest.raises(NonFiniteError, match="gradient: 1 of 600"):
            quantise(w, name="gradient")


@pytest.mark.parametrize("shape", SHAPES)
def test_activations_equal_oracle(shape):
    torch.manual_seed(1)
    x = (torch.randn(shape) * 3).bfloat16()
    got = round_trip_groups(x)
    np.testing.assert_allclose(
        got.numpy(), oracle.round_trip_rows(x.float().numpy()), rtol=2**-23, atol=0
    )


def test_views_give_what_copies_give():
    x = torch.randn(300, 260).bfloat16()
    assert torch.equal(round_trip_groups(x.t()), round_trip_groups(x.t().contiguous()))
    assert torch.equal(round_trip_groups(x[:, 3:200]), round_trip_groups(x[:, 3:200].clone()))
    w = torch.randn(200, 300)
    assert torch.equal(quantise_weight(w.t()).codes, quantise_weight(w.t().contiguous()).codes)


def test_padding():
    assert [padded_size(n, 128) for n in (1, 128, 129)] == [128, 128, 256]
    x = torch.ones(3, 5)
    assert pad_dim(x, 1, 5) is x
    assert pad_dim(x, 0, 4).shape == (4, 5)
    assert pad_dim(x, -1, 4).sum() == 15


def fused(parts: list[torch.Tensor]) -> tuple[torch.Tensor, Projections]:
    """Two projections of 128 and 130 rows, interleaved."""
    rows = sum(len(p) for p in parts)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(3))
    projections = Projections(("a", "b"), tuple(len(p) for p in parts), order)
    return projections.join(parts), projections


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 1000])
def test_linear_and_its_gradients_equal_the_oracle(tokens):
    """Forward, dgrad and wgrad with each operand quantised along its contraction, projections apart."""
    torch.manual_seed(tokens)
    k = 200
    parts = [torch.randn(128, k) * 0.1, torch.randn(130, k) * 0.02]
    w, projections = fused(parts)
    w.requires_grad_()
    x = torch.randn(tokens, k, requires_grad=True)
    dy = torch.randn(tokens, 258) * 0.01
    y = fp8_linear(x, w, Fp8Weight(projections))
    y.backward(dy)

    quantised = [oracle.quantise_weight(p.numpy()) for p in parts]
    w_q = np.concatenate([oracle.dequantise_weight(*q) for q in quantised])
    order = projections.order.numpy()
    x_np = x.detach().numpy()
    want_y = np.empty((tokens, 258))
    want_y[:, order] = oracle.round_trip_rows(x_np) @ w_q.T
    dy_hf = dy.numpy()[:, order]
    dy_groups = [oracle.round_trip_rows(dy_hf[:, :128]), oracle.round_trip_rows(dy_hf[:, 128:])]
    want_dx = np.concatenate(dy_groups, 1) @ w_q
    want_dw = oracle.round_trip_rows(dy.numpy().T) @ oracle.round_trip_rows(x_np.T).T

    for got, want in ((y.detach(), want_y), (x.grad, want_dx), (w.grad, want_dw)):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=2e-6 * np.abs(want).max() + 1e-9)
    # The FP32 product is another thing: the test above can fail.
    exact = x_np @ w.detach().numpy().T
    assert np.abs(y.detach().numpy() - exact).max() > 1e-3 * np.abs(exact).max()


def test_weight_is_quantised_once_per_version():
    w = torch.nn.Parameter(torch.randn(128, 128))
    fp8 = Fp8Weight(Projections(("w",), (128,)))
    first = fp8.dequantised(w)
    assert fp8.dequantised(w) is first
    with torch.no_grad():
        w.mul_(2)
    assert torch.equal(fp8.dequantised(w), first * 2)


def test_optimiser_step_refreshes_the_quantised_weight():
    w = torch.nn.Parameter(torch.randn(128, 128))
    fp8 = Fp8Weight(Projections(("w",), (128,)))
    before = fp8.dequantised(w).clone()
    optimiser = torch.optim.AdamW([w], lr=0.1, foreach=True)
    fp8_linear(torch.randn(4, 128), w, fp8).sum().backward()
    optimiser.step()
    assert not torch.equal(fp8.dequantised(w), before)
    want = quantise_weight(w)
    assert torch.equal(fp8.quantised(w)["w"].codes, want.codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (700, 300)])  # the last is long enough for two threads
def test_compiled_pass_has_the_bits_of_the_definition(shape, pow2, dtype):
    torch.manual_seed(2)
    x = torch.randn(shape) * torch.exp2(torch.randint(-30, 9, shape).float())
    x[torch.rand(shape) < 0.1] = 0.0
    x[torch.rand(shape) < 0.1] = -0.0
    x[0] = 1e-39 if dtype is torch.float32 else 1e-38  # scales that overflow
    x = x.to(dtype)
    for along_rows in (True, False):
        got = compiled.round_trip(x, along_rows=along_rows, power_of_two=pow2)
        source = x if along_rows else x.t()
        values, scale_inv = quantise_groups(source, power_of_two=pow2)
        want = (values * scale_inv).flatten(-2)[:, : source.shape[1]]
        want = want if along_rows else want.t()
        assert torch.equal(got.view(torch.int32), want.contiguous().view(torch.int32))


def test_compiled_pass_rounds_every_boundary_alike():
    points = boundaries()
    x = torch.cat([points, torch.full((-len(points) % 127,), 448.0)]).view(-1, 127)
    x = torch.nn.functional.pad(x, (1, 0), value=448.0)  # amax 448: scale 1, values as they are
    got = compiled.round_trip(x, along_rows=True, power_of_two=False)
    assert torch.equal(got.view(torch.int32), round_to_e4m3(x).view(torch.int32))
