"""The FP8 quantiser against the independent oracle (tests/oracle.py), bit for bit.

Subnormal FP32 numbers are part of the definition, so these tests run with IEEE arithmetic (`ieee`),
whatever a library has set in this process. What holds without it: `test_..._flushed_to_zero`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8rl.numerics import compiled, elements
from fp8rl.numerics.formats import (
    E4M3,
    E5M2,
    Element,
    ScaleRule,
    Scaling,
    Scheme,
    activation_scheme,
    fp8_recipe,
    weight_scheme,
)
from fp8rl.numerics.padding import pad_dim, padded_size, token_multiple
from fp8rl.numerics.quantise import NonFiniteError, define, quantise, quantise_values, round_trip
from tests import oracle

ELEMENTS = {"e4m3": E4M3, "e5m2": E5M2}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (128, 128), (129, 127), (200, 300), (1, 1000), (1000, 1)]
ENTRIES: list[Callable] = [quantise, quantise_values, round_trip, define]


def flushes() -> bool:
    """Whether this thread's FP32 arithmetic turns subnormal numbers into zeros."""
    return (torch.tensor([2.0**-126]) * 0.5).view(torch.int32).item() == 0


@contextmanager
def flush(on: bool) -> Iterator[None]:
    before = flushes()
    torch.set_flush_denormal(on)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def ieee() -> Iterator[None]:
    """IEEE arithmetic; one thread, which for small tensors is faster on a busy machine."""
    with flush(False), threads(1):
        yield


@dataclass(frozen=True)
class Case:
    """One way to quantise a tensor, for fp8rl and for the oracle."""

    mode: str
    what: str
    element: str
    pow2: bool
    axis: int

    def __str__(self) -> str:
        rule = "pow2" if self.pow2 else "fp32"
        return f"{self.mode}-{self.what}-{self.element}-{rule}-axis{self.axis}"

    @property
    def scheme(self) -> Scheme:
        make = weight_scheme if self.what == "weight" else activation_scheme
        rule = ScaleRule.POW2 if self.pow2 else ScaleRule.FP32
        scheme = make(Scaling(self.mode), ELEMENTS[self.element], rule)
        return scheme if self.axis == 1 else scheme.turned()

    def oracle(self, x: Tensor) -> oracle.Quantised:
        options = {"element": self.element, "pow2": self.pow2, "axis": self.axis}
        dtype = str(x.dtype).removeprefix("torch.")
        return oracle.quantise(x.float().numpy(), self.mode, self.what, dtype=dtype, **options)


CASES = [
    Case(mode, what, element, pow2, axis)
    for mode in Scaling
    for what in (("weight", "activation") if mode is Scaling.BLOCK else ("activation",))
    for element in ELEMENTS
    for pow2 in ((False,) if mode is Scaling.MXFP8 else (False, True))
    for axis in (1, 0)
]


def bits(x: Tensor | np.ndarray) -> np.ndarray:
    """Bit patterns: -0.0 is not 0.0."""
    array = x.numpy() if isinstance(x, Tensor) else x
    return array.view(np.uint32) if array.dtype == np.float32 else array


def assert_equals_oracle(x: Tensor, case: Case) -> None:
    """Codes, values and scales of every entry point have the oracle's bits."""
    want = case.oracle(x)
    descale, values = bits(want.descale), bits(want.values().astype(np.float32))
    dequantised = bits(want.dequantised())
    got = quantise(x, case.scheme)
    np.testing.assert_array_equal(bits(got.scale_inv), descale)
    np.testing.assert_array_equal(bits(got.codes), want.codes)
    np.testing.assert_array_equal(bits(got.values()), values)
    np.testing.assert_array_equal(bits(got.dequantise()), dequantised)
    np.testing.assert_array_equal(bits(round_trip(x, case.scheme)), dequantised)
    for found, scale_inv in (quantise_values(x, case.scheme), define(x, case.scheme)):
        np.testing.assert_array_equal(bits(scale_inv), descale)
        np.testing.assert_array_equal(bits(found.float()), values)


def tensor(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values over 40 powers of two, with zeros of both signs, a zero row and a row of tiny values."""
    generator = torch.Generator().manual_seed(seed)

    def mask(share: float) -> Tensor:
        return torch.rand(shape, generator=generator) < share

    exponent = torch.randint(-30, 10, shape, generator=generator).float()
    x = torch.randn(shape, generator=generator) * torch.exp2(exponent)
    x[mask(0.05)] = 0.0
    x[mask(0.05)] = -0.0
    if shape[0] > 140:
        x[: shape[0] // 3] *= 1e-3
        x[3] = 0.0
        x[5] = -1e-38  # its scale overflows; zero in FP16
    return x.to(dtype)


# --- elements


def boundaries(element: Element, name: str) -> Tensor:
    """Every value, every midpoint between two, and the FP32 neighbours of all of them."""
    values = oracle.TABLES[name]
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    points = np.concatenate([points, *(np.nextafter(points, np.float32(s)) for s in (1e9, -1e9))])
    points = points[np.abs(points) <= element.max]
    return torch.from_numpy(np.concatenate([points, -points]))


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("name", ELEMENTS)
def test_rounding_equals_oracle_and_torch_cast_at_every_boundary(name, flushed):
    element = ELEMENTS[name]
    x = boundaries(element, name)
    assert len(x) > 6 * 120
    want = oracle.encode(x.numpy(), name)
    with flush(flushed):
        codes = elements.encode(elements.round_to(x, element), element)
    np.testing.assert_array_equal(codes.numpy(), want)
    assert torch.equal(codes, x.to(elements.DTYPES[element]).view(torch.uint8))


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("name", ELEMENTS)
def test_every_code_decodes_and_encodes_to_itself(name, flushed):
    element = ELEMENTS[name]
    codes = torch.from_numpy(oracle.finite_codes(name))
    with flush(flushed):
        values = elements.decode(codes, element)
        again = elements.encode(values, element)
    np.testing.assert_array_equal(bits(values), bits(oracle.decode(codes.numpy(), name).astype("f4")))
    assert torch.equal(again, codes)
    assert torch.equal(elements.decode(codes.view(elements.DTYPES[element]), element), values)


@pytest.mark.parametrize("name", ELEMENTS)
def test_special_codes_are_refused(name):
    special = sorted(set(range(256)) - set(oracle.finite_codes(name).tolist()))
    assert len(special) == {"e4m3": 2, "e5m2": 8}[name]
    for code in special:
        with pytest.raises(ValueError, match=f"{name.upper()} tensor holds a NaN or Inf code"):
            elements.decode(torch.tensor([0, code], dtype=torch.uint8), ELEMENTS[name])


@pytest.mark.parametrize("name", ELEMENTS)
def test_constants_of_the_elements_are_those_of_torch(name):
    element, info = ELEMENTS[name], torch.finfo(elements.DTYPES[ELEMENTS[name]])
    assert element.max == info.max == oracle.TABLES[name][-1]
    assert element.min_normal == info.tiny
    assert element.min_subnormal == oracle.TABLES[name][1]


# --- the quantiser


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_entry_point_equals_the_oracle(case, dtype):
    for shape in SHAPES:
        assert_equals_oracle(tensor(shape, dtype), case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_descales_have_the_shape_the_scheme_says(case):
    for shape in SHAPES:
        want = case.scheme.scale_shape(*shape)
        assert quantise(torch.ones(shape), case.scheme).scale_inv.shape == want
        assert case.oracle(torch.ones(shape)).descale.shape == want


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tensors_without_elements(case, shape):
    for entry in ENTRIES:
        result = entry(torch.empty(shape), case.scheme)
        first = result if isinstance(result, Tensor) else getattr(result, "codes", None)
        assert (result[0] if first is None else first).shape == shape


@pytest.mark.parametrize("case", CASES, ids=str)
def test_normal_numbers_are_the_same_with_subnormal_ones_flushed_to_zero(case):
    """Fast-math libraries switch flush-to-zero on for a whole process.

    Expected: codes and descales of tiles of zeros and of tiles with normal descales (for E5M2, amax
    above about 1e-33) stay what they are. Only descales below 2^-126 may become 0: their tiles then
    dequantise to zeros. MXFP8's descale of a zero tile, 2^-127, is a constant and stays.
    """
    x = torch.cat([tensor((130, 260), torch.float32) * 1e-20, torch.zeros(130, 260)])
    x[x.abs() < 1e-30] = 0.0
    with flush(False):
        want, again = quantise(x, case.scheme), round_trip(x, case.scheme)
    with flush(True):
        got = quantise(x, case.scheme)
        trip = round_trip(x, case.scheme)
        values, scale_inv = define(x, case.scheme)
    np.testing.assert_array_equal(bits(got.codes), bits(want.codes))
    np.testing.assert_array_equal(bits(got.scale_inv), bits(want.scale_inv))
    np.testing.assert_array_equal(bits(trip), bits(again))
    np.testing.assert_array_equal(bits(values), bits(want.values()))
    np.testing.assert_array_equal(bits(scale_inv), bits(want.scale_inv))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_non_finite_input_is_refused_with_name_count_and_place(case, bad):
    for dtype in DTYPES:
        x = torch.ones(3, 200, dtype=dtype)
        x[1, 150] = x[2, 0] = bad
        for entry in ENTRIES:
            for view in (x, x.t().contiguous().t()):
                with pytest.raises(NonFiniteError, match=r"layer\.7: 2 of 600 .* \(1, 150\)"):
                    entry(view, case.scheme, name="layer.7")


# --- the compiled pass, cut among threads


# Tile rows: fewer than threads, as many, not divisible by them, many more than them.
LARGE = [(300, 1000), (2, 140_000), (140_000, 2), (1, 270_000), (270_000, 1), (1030, 257)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pass_cut_among_threads_has_the_bits_of_the_definition(case, monkeypatch):
    cuts = []
    pool = compiled._threads
    monkeypatch.setattr(compiled, "_threads", lambda count: cuts.append(count) or pool(count))
    for index, shape in enumerate(LARGE):
        if min(shape) < 128 and case.what == "weight":
            continue  # the definition would pad it to many times its size
        x = tensor(shape, DTYPES[index % 2])
        assert x.numel() >= compiled._WORTH_A_THREAD
        values, scale_inv = define(x, case.scheme)
        for count in (2, 3):
            cuts.clear()
            with threads(count):
                allowed = torch.get_num_threads()  # vLLM, once started here, binds it to the cores
                got, descale = quantise_values(x, case.scheme)
            parts = min(allowed, scale_inv.shape[0])
            assert cuts == ([parts] if parts > 1 else [])
            assert torch.equal(descale.view(torch.int32), scale_inv.view(torch.int32))
            assert torch.equal(got.float().view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("row", [0, 1029])
def test_non_finite_value_in_any_part_is_seen(row):
    x = torch.ones(1030, 257)
    x[row, 256] = float("nan")
    for case in (case for case in CASES if case.element == "e4m3"):
        with threads(2), pytest.raises(NonFiniteError, match=rf"1 of 264710 .* \({row}, 256\)"):
            round_trip(x, case.scheme)


# --- recipes and padding


def test_recipe_gives_each_operand_its_element_and_rule():
    recipe = fp8_recipe(Scaling.BLOCK, weights=ScaleRule.POW2, hybrid=True)
    assert (recipe.weight.tile, recipe.weight.rule) == ((128, 128), ScaleRule.POW2)
    assert (recipe.input.tile, recipe.input.rule) == ((1, 128), ScaleRule.FP32)
    assert [s.element for s in (recipe.weight, recipe.input, recipe.gradient)] == [E4M3, E4M3, E5M2]
    assert recipe.gradient.turned().tile == (128, 1)
    assert fp8_recipe(Scaling.MXFP8, activations=ScaleRule.POW2).input.rule is ScaleRule.UE8M0
    assert fp8_recipe().gradient.element is E4M3


def test_padding():
    assert [padded_size(n, 128) for n in (0, 1, 128, 129)] == [0, 128, 128, 256]
    x = torch.ones(3, 5)
    assert pad_dim(x, 1, 5) is x
    assert pad_dim(x, 0, 4).shape == (4, 5)
    assert pad_dim(x, 0, 4)[3].eq(0).all()
    assert pad_dim(x, -1, 4).shape == (3, 8)
    assert pad_dim(x, -1, 4)[:, :5].equal(x)


@pytest.mark.parametrize(
    ("scaling", "base"), [("block", 128), ("mxfp8", 32), ("tensor", 16), ("channel", 16)]
)
def test_tokens_are_a_multiple_for_each_rank_of_sequence_and_context_parallelism(scaling, base):
    mode = Scaling(scaling)
    assert token_multiple(mode) == base
    assert token_multiple(mode, tensor_parallel=4) == base
    assert token_multiple(mode, tensor_parallel=4, sequence_parallel=True) == 4 * base
    assert token_multiple(mode, context_parallel=2) == 4 * base
    both = token_multiple(mode, tensor_parallel=2, sequence_parallel=True, context_parallel=3)
    assert both == 2 * 6 * base
