"""Properties of the FP8 quantiser over generated tensors, in every mode, rule, element and axis.

Inputs include subnormal FP32 numbers; the tests run with IEEE arithmetic (see test_numerics.py).
"""

from collections.abc import Callable

import hypothesis.extra.numpy as npst
import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8rl.numerics import elements
from fp8rl.numerics.quantise import define, quantise, quantise_values, round_trip
from tests import oracle
from tests.unit.test_numerics import (
    CASES,
    DTYPES,
    ELEMENTS,
    Case,
    assert_equals_oracle,
    bits,
    ieee,  # noqa: F401 (a fixture of this module too)
)

FAST = settings(derandomize=True, deadline=None, max_examples=60, database=None)
FEW = settings(FAST, max_examples=25)

cases = st.sampled_from(CASES)
dtypes = st.sampled_from(DTYPES)
sides = st.one_of(st.integers(1, 5), st.sampled_from([31, 32, 33, 127, 128, 129]), st.integers(1, 300))
shapes = st.tuples(sides, sides)
seeds = st.integers(0, 2**32 - 1)


def normal(shape: tuple[int, int], seed: int, spread: int = 3) -> Tensor:
    """Normally distributed values over a few powers of two."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-spread, spread + 1, shape, generator=generator).float()
    return torch.randn(shape, generator=generator) * torch.exp2(exponent)


def assert_same(got: Tensor, want: Tensor | np.ndarray) -> None:
    np.testing.assert_array_equal(bits(got), bits(want))


# --- against the oracle


any_float = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
small_arrays = npst.arrays(
    np.float32, st.tuples(st.integers(1, 4), st.integers(1, 40)), elements=any_float
)


@settings(FAST, max_examples=200)
@given(small_arrays, cases, dtypes)
@example(np.full((2, 3), 2**-149, np.float32), CASES[0], torch.float32)
@example(np.full((2, 3), 3.4028235e38, np.float32), CASES[0], torch.float32)
def test_any_floats(array, case, dtype):
    x = torch.from_numpy(array).to(dtype)
    assume(bool(torch.isfinite(x).all()))  # FP16 and BF16 do not hold every FP32 number
    assert_equals_oracle(x, case)


@FAST
@given(shapes, seeds, st.integers(-149, 127), st.integers(0, 12), cases, dtypes)
def test_any_shape_and_amax(shape, seed, exponent, spread, case, dtype):
    """From tiles so small that their scale overflows up to the largest number of the dtype."""
    x = (normal(shape, seed, spread).double() * 2.0**exponent).float()
    largest = torch.finfo(dtype).max
    x = torch.nan_to_num(x, posinf=largest, neginf=-largest).clamp(-largest, largest).to(dtype)
    assert_equals_oracle(x, case)


@FAST
@given(shapes, seeds, cases, dtypes, st.data())
def test_zero_rows_columns_and_tiles(shape, seed, case, dtype, data):
    x = normal(shape, seed).to(dtype)
    x[data.draw(st.integers(0, shape[0] - 1))] = 0.0
    x[:, data.draw(st.integers(0, shape[1] - 1))] = -0.0
    if data.draw(st.booleans()):
        x[:128, :128] = 0.0
    assert_equals_oracle(x, case)


@FEW
@given(shapes, cases, dtypes, st.sampled_from([0.0, -0.0]))
def test_tensor_of_zeros_keeps_them_with_a_finite_descale(shape, case, dtype, zero):
    x = torch.full(shape, zero, dtype=dtype)
    got = quantise(x, case.scheme)
    assert set(got.codes.flatten().tolist()) == {0x80 if str(zero) == "-0.0" else 0}
    assert got.scale_inv.unique().tolist() == [2.0**-127 if case.mode == "mxfp8" else 1.0]
    assert_same(round_trip(x, case.scheme), x.float())
    assert_equals_oracle(x, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tile_whose_scale_overflows(case, dtype):
    """Largest number of the dtype (block) or of FP32; in MXFP8 the lowest exponent gives zeros."""
    smallest = oracle.TABLES[case.element][-1] / oracle.LARGEST["float32"]
    for amax in (1e-39, 1e-38, 0.5 * smallest, 0.99 * smallest, 1.01 * smallest):
        assert_equals_oracle(torch.tensor([[amax, -amax / 3], [amax / 7, 0.0]], dtype=dtype), case)
    got = quantise(torch.full((2, 2), 1e-38, dtype=dtype), case.scheme)
    if case.mode == "mxfp8":
        assert got.scale_inv.unique().tolist() == [2.0**-127]
        assert not got.codes.any()
        return
    largest = torch.finfo(dtype if case.mode == "block" else torch.float32).max
    scale = 2.0**127 if case.pow2 else largest
    assert_same(got.scale_inv.unique(), np.array([1 / scale], dtype=np.float32))
    expected = min(1e-38 * scale, oracle.TABLES[case.element][-1])
    assert got.values().unique().item() == pytest.approx(expected, rel=2**-2)


# --- ties, saturation, signs


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ties_go_to_the_even_code_at_every_exponent(case):
    table = oracle.TABLES[case.element]
    ties = (table[1:] + table[:-1]) / 2  # between codes c and c + 1
    even = np.arange(len(ties)) + np.arange(len(ties)) % 2
    top = np.full(len(ties), table[-1])  # makes the scale 1 (MXFP8: 1 or 1/2, see below)
    for sign in (1, -1):
        # Each tie beside the largest value, in a tile of its own along either axis.
        x = torch.from_numpy(np.stack([sign * ties, top], axis=1).astype(np.float32))
        x = x if case.axis == 1 else x.t().contiguous()
        got = quantise(x, case.scheme)
        assert_equals_oracle(x, case)
        if case.mode == "mxfp8":
            continue  # amax * (1 / max) may round to just above 1, and the descale is then 2
        assert got.scale_inv.unique().tolist() == [1.0]
        codes = (got.codes if case.axis == 1 else got.codes.t())[:, 0].numpy()
        np.testing.assert_array_equal(codes & 0x7F, even)


@FAST
@given(shapes, seeds, cases, dtypes, st.floats(1.0, 2.0, width=32))
def test_largest_magnitude_saturates_and_no_code_is_special(shape, seed, case, dtype, factor):
    x = (normal(shape, seed) * factor).to(dtype)
    got = quantise(x, case.scheme)
    limit = oracle.TABLES[case.element][-1]
    values = got.values().abs()  # raises on a special code
    assert values.max() <= limit
    assert values.max() > limit / 2 - 1 or not x.any()
    if not case.pow2 and case.mode != "mxfp8":
        assert values.flatten()[x.abs().argmax()] == limit  # amax lands on the largest value


@FAST
@given(shapes, seeds, cases, dtypes)
def test_signs_are_kept_and_magnitudes_are_symmetric(shape, seed, case, dtype):
    x = normal(shape, seed, spread=8).to(dtype)
    got, mirrored = quantise(x, case.scheme), quantise(-x, case.scheme)
    assert torch.equal(mirrored.codes, got.codes ^ 0x80)
    assert_same(mirrored.scale_inv, got.scale_inv)
    assert torch.equal(got.codes >= 0x80, torch.signbit(x))


# --- layouts


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "slice": lambda x: x[1:, 2:-1],
    "strided": lambda x: x[::2, ::3],
    "column of a larger one": lambda x: x[:, 1:2],
    "permuted": lambda x: x.view(1, *x.shape).permute(2, 1, 0).squeeze(2),
    "expanded": lambda x: x[:1].expand(130, -1),
    "expanded columns": lambda x: x[:, :1].expand(-1, 130),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_views_give_what_their_contiguous_copies_give(case, view):
    for dtype in DTYPES:
        x = VIEWS[view](normal((131, 137), 5).to(dtype))
        copy = x.clone(memory_format=torch.contiguous_format)
        assert not x.is_contiguous()
        a, b = quantise(x, case.scheme), quantise(copy, case.scheme)
        assert torch.equal(a.codes, b.codes)
        assert a.codes.is_contiguous()
        assert_same(a.scale_inv, b.scale_inv)
        assert_same(round_trip(x, case.scheme), round_trip(copy, case.scheme))
        for entry in (define, quantise_values):
            for got, want in zip(entry(x, case.scheme), entry(copy, case.scheme), strict=True):
                assert_same(got.float(), want.float())


@FEW
@given(shapes, seeds, cases, dtypes)
def test_turned_scheme_is_the_scheme_of_the_transpose(shape, seed, case, dtype):
    x = normal(shape, seed).to(dtype)
    turned = quantise(x.t(), case.scheme.turned())
    got = quantise(x, case.scheme)
    assert torch.equal(turned.codes.t(), got.codes)
    assert_same(turned.scale_inv.t().contiguous(), got.scale_inv)
    assert case.scheme.turned().turned() == case.scheme


@FEW
@given(shapes, seeds, cases, dtypes)
def test_input_is_not_written_to_and_carries_no_gradient(shape, seed, case, dtype):
    x = normal(shape, seed).to(dtype).requires_grad_()
    before = x.detach().clone()
    assert not round_trip(x, case.scheme).requires_grad
    assert not quantise_values(x, case.scheme)[0].requires_grad
    assert torch.equal(quantise(x, case.scheme).codes, quantise(before, case.scheme).codes)
    assert torch.equal(x.detach(), before)


# --- quantising again, and scaling


@FAST
@given(shapes, seeds, st.integers(-60, 60), cases)
def test_requantising_dequantised_values_changes_nothing(shape, seed, exponent, case):
    """FP32 descales may move by a unit in the last place, rarely two: three roundings make them."""
    x = normal(shape, seed) * 2.0**exponent
    once = quantise(x, case.scheme)
    again = quantise(once.dequantise(), case.scheme)
    if case.pow2 or case.mode == "mxfp8":
        # A tile's largest value may round down to half of the range: then codes move, values do not.
        assert_same(again.dequantise(), once.dequantise())
        return
    assert torch.equal(again.codes, once.codes)
    ulps = again.scale_inv.view(torch.int32) - once.scale_inv.view(torch.int32)
    assert int(ulps.abs().max()) <= 2


@FEW
@given(shapes, seeds, cases)
def test_requantising_from_bf16_gives_the_same_values(shape, seed, case):
    """Weights may travel dequantised in BF16; normal FP8 values survive its rounding."""
    once = quantise(normal(shape, seed), case.scheme)
    again = quantise(once.dequantise().bfloat16(), case.scheme)
    if case.pow2 or case.mode == "mxfp8":
        assert_same(again.dequantise(), once.dequantise())
    else:
        assert torch.equal(again.codes, once.codes)


@FAST
@given(shapes, seeds, st.integers(-60, 60), cases, st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_power_of_two_moves_to_the_descale(shape, seed, exponent, case, dtype):
    x = normal(shape, seed, spread=6).to(dtype)
    x[x.abs() < 2.0**-40] = 0.0  # no tile's scale leaves FP32's range
    got, want = quantise(x * 2.0**exponent, case.scheme), quantise(x, case.scheme)
    assert torch.equal(got.codes, want.codes)
    zero = {2.0**-127} if case.mode == "mxfp8" else {1.0}  # a tile of zeros has a fixed descale
    moved = got.scale_inv == want.scale_inv * 2.0**exponent
    assert set(want.scale_inv[~moved].tolist()) <= zero


@pytest.mark.parametrize("name", ELEMENTS)
@settings(FAST, max_examples=200)
@given(npst.arrays(np.float32, st.integers(1, 60), elements=any_float))
def test_rounding_of_any_float_within_range_equals_the_oracle(name, array):
    element = ELEMENTS[name]
    x = torch.from_numpy(array).clamp(-element.max, element.max)
    codes = elements.encode(elements.round_to(x, element), element)
    np.testing.assert_array_equal(codes.numpy(), oracle.encode(x.numpy(), name))


@pytest.mark.parametrize("mode", ["block", "channel", "mxfp8"])
def test_tiles_do_not_see_each_other(mode):
    """A huge row changes its own tiles only."""
    case = Case(mode, "activation", "e4m3", False, 1)
    x = normal((5, 300), 0)
    before = quantise(x, case.scheme)
    x[2] *= 1e6
    after = quantise(x, case.scheme)
    others = [0, 1, 3, 4]
    assert torch.equal(after.codes[others], before.codes[others])
    assert_same(after.scale_inv[others], before.scale_inv[others])
    assert (after.scale_inv[2] > before.scale_inv[2] * 1e5).all()
