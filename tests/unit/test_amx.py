"""The AMX kernel of the block-scaled product against its formula in float64."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fp8rl.numerics import amx

needs_amx = pytest.mark.skipif(amx.unavailable() is not None, reason=str(amx.unavailable()))

# M, N and the groups of K: every edge of a tile (16 rows, 32 k), a panel (32 rows) and a group.
SHAPES = [
    (1, 1, (1,)),
    (15, 31, (15,)),
    (16, 16, (16,)),
    (17, 33, (17,)),
    (31, 127, (31,)),
    (33, 17, (33,)),
    (127, 15, (127,)),
    (128, 128, (128,)),
    (129, 1, (128, 1)),
    (1, 1000, (128, 128, 64, 128, 64)),
    (1000, 129, (1, 33, 128, 31, 2)),
    (32, 576, (128,) * 7 + (104,)),
    (300, 1000, (128,) * 4 + (64,)),
    (70, 2100, (128,) * 10),  # more columns than a core's cache keeps
]


def split(groups):
    stops = np.cumsum(groups)
    return list(zip(stops - groups, stops, strict=True))


def formula(a, sa, b, sb, groups):
    """float64 [M, N]."""
    a, sa, b, sb = (x.double().numpy() for x in (a, sa, b, sb))
    parts = [a[:, i:j] @ b[:, i:j].T for i, j in split(groups)]
    return sum(np.outer(sa[:, g], sb[:, g]) * part for g, part in enumerate(parts))


def random_codes(rows, size, generator):
    codes = torch.randint(0, 256, (rows, size), dtype=torch.uint8, generator=generator)
    return codes.masked_fill_((codes & 0x7F) == 0x7F, 0)


def decode(codes, dtype=torch.float8_e4m3fn):
    return codes.view(dtype).to(torch.bfloat16)


def random_operands(m, n, groups):
    """E4M3 codes and FP32 descales of both operands, of many magnitudes."""
    generator = torch.Generator().manual_seed(m + n)
    a, b = (random_codes(rows, sum(groups), generator) for rows in (m, n))
    scales = [torch.rand(rows, len(groups), generator=generator) + 0.1 for rows in (m, n)]
    sa, sb = (s * torch.exp2(torch.arange(s.numel()).view_as(s) % 7 - 3.0) for s in scales)
    return a, sa, b, sb


def product(a, sa, b, sb, groups, dtype=torch.float32):
    left = amx.pack_left(a, sa, groups, contract=1)
    return amx.product(left, amx.pack_right(b, sb, groups, contract=1), dtype)


@needs_amx
@pytest.mark.parametrize(("m", "n", "groups"), SHAPES)
def test_integers_with_power_of_two_scales_are_exact(m, n, groups):
    generator = torch.Generator().manual_seed(0)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    a, b = (draw(-4, 5, rows, sum(groups)).bfloat16() for rows in (m, n))
    sa, sb = (torch.exp2(draw(0, 3, rows, len(groups)).float()) for rows in (m, n))
    want = formula(a, sa, b, sb, groups)
    assert np.abs(want).max() < 2**24
    got = product(a, sa, b, sb, groups)
    np.testing.assert_array_equal(got.numpy(), want)
    assert torch.equal(product(a, sa, b, sb, groups, torch.bfloat16), got.bfloat16())


@needs_amx
@pytest.mark.parametrize(("m", "n", "groups"), SHAPES)
def test_every_layout_gives_the_bits_of_one_and_they_are_the_formulas(m, n, groups):
    a, sa, b, sb = random_operands(m, n, groups)
    lefts = [
        amx.pack_left(decode(a), sa, groups, contract=1),
        amx.pack_left(decode(a).t().contiguous(), sa.t(), groups, contract=0),
    ]
    rights = [
        amx.pack_right(x if contract == 1 else x.t().contiguous(), scale, groups, contract=contract)
        for x in (decode(b), b)
        for contract, scale in ((1, sb), (0, sb.t().contiguous()))
    ]
    first = amx.product(lefts[0], rights[0], torch.float32)
    bound = formula(decode(a).abs(), sa, decode(b).abs(), sb, groups)
    wrong = np.abs(first.double().numpy() - formula(decode(a), sa, decode(b), sb, groups))
    assert (wrong <= 2e-6 * bound).all()
    for left in lefts:
        for right in rights:
            assert torch.equal(amx.product(left, right, torch.float32), first)
            assert torch.equal(amx.product(left, right, torch.bfloat16), first.bfloat16())


@needs_amx
@pytest.mark.parametrize("flush", [False, True], ids=["subnormals", "flushed"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_pair_of_values_multiplies_exactly(dtype, flush):
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[torch.isfinite(codes.view(dtype).float())].view(-1, 1)
    values = decode(codes, dtype)
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    assert values.max() == largest
    assert values[values > 0].min() < smallest
    ones = torch.ones(len(codes), 1)
    want = np.outer(values.double(), values.double())
    torch.set_flush_denormal(flush)
    try:
        operands = [values] + [codes] * (dtype is torch.float8_e4m3fn)
        for right in operands:
            got = product(values, ones, right, ones, (1,))
            np.testing.assert_array_equal(got.numpy(), want)
    finally:
        torch.set_flush_denormal(False)


@needs_amx
def test_views_with_row_strides_are_read_in_place():
    groups = (128, 72)
    a, sa, b, sb = random_operands(40, 50, groups)
    want = product(decode(a), sa, decode(b), sb, groups)
    wide_a, wide_b = torch.full((40, 333), 99, dtype=torch.uint8), torch.full((201, 77), 99).byte()
    wide_a[:, 7:207], wide_b[1:, 5:55] = a, b.t()
    wide_sa = torch.full((40, 5), torch.nan)
    wide_sa[:, 1:4:2] = sa
    left = amx.pack_left(decode(wide_a)[:, 7:207], wide_sa[:, 1:4:2], groups, contract=1)
    for right in (decode(wide_b), wide_b):
        packed = amx.pack_right(right[1:, 5:55], sb.t(), groups, contract=0)
        assert torch.equal(amx.product(left, packed, torch.float32), want)


@needs_amx
def test_zero_scales_and_zero_values_give_zero():
    groups = (128, 128)
    a, sa, b, sb = random_operands(20, 20, groups)
    assert not product(decode(a), torch.zeros_like(sa), b, sb, groups).any()
    assert not product(decode(a), sa, torch.zeros_like(b), sb, groups).any()
    sa[:, 0] = 0  # one group alone
    want = formula(decode(a)[:, 128:], sa[:, 1:], decode(b)[:, 128:], sb[:, 1:], (128,))
    np.testing.assert_allclose(product(decode(a), sa, b, sb, groups), want, rtol=1e-4, atol=1e-2)


@needs_amx
def test_nan_code_becomes_nan():
    codes = torch.tensor([[0x7F], [0xFF], [0x38]], dtype=torch.uint8)
    got = product(torch.ones(1, 1).bfloat16(), torch.ones(1, 1), codes, torch.ones(3, 1), (1,))
    assert got.isnan().tolist() == [[True, True, False]]


@needs_amx
@pytest.mark.parametrize("codes", [True, False], ids=["codes", "bf16"])
def test_bits_depend_neither_on_threads_nor_on_repeats_nor_on_other_rows(codes):
    groups = (128,) * 5 + (40,)
    a, sa, b, sb = random_operands(300, 700, groups)
    right = b if codes else decode(b)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 2, 3, 8, before):
            torch.set_num_threads(threads)
            results.append(product(decode(a), sa, right, sb, groups))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)
    rows = product(decode(a)[33:50], sa[33:50], right, sb, groups)
    assert torch.equal(rows, results[0][33:50])


@needs_amx
def test_products_between_torchs_own_on_the_same_unit():
    """oneDNN sets up the matrix unit too: neither may find the other's set-up."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 256).bfloat16(), torch.randn(96, 256).bfloat16()
    a, sa, b, sb = random_operands(50, 60, (128, 5))
    linear, scaled = F.linear(x, w), product(decode(a), sa, b, sb, (128, 5))
    for _ in range(3):
        assert torch.equal(F.linear(x, w), linear)
        assert torch.equal(product(decode(a), sa, b, sb, (128, 5)), scaled)


@needs_amx
def test_empty_operands():
    groups = (128,)
    none, some = torch.empty(0, 128).bfloat16(), torch.ones(3, 128).bfloat16()
    assert product(none, torch.empty(0, 1), some, torch.ones(3, 1), groups).shape == (0, 3)
    assert product(some, torch.ones(3, 1), none, torch.empty(0, 1), groups).shape == (3, 0)


@needs_amx
def test_operands_that_do_not_fit_are_refused():
    x, s = torch.zeros(4, 200).bfloat16(), torch.ones(4, 2)
    refused = [
        ("add up to 199, but K is 200", x, s, (128, 71), 1),
        (r"\(4, 2\) should be \(4, 3\)", x, s, (128, 64, 8), 1),
        (r"\(4, 2\) should be \(2, 4\)", x.t().contiguous(), s, (128, 72), 0),
        ("not sizes of 1 or more", x, s, (200, 0), 1),
        ("not sizes of 1 or more", x, s, (), 1),
        ("not 2-D", x[0], s, (128, 72), 1),
        ("contract=2", x, s, (128, 72), 2),
        ("last has to be 1", x.t(), s.t(), (128, 72), 0),
        ("float32 with", x.float(), s, (128, 72), 1),
        ("scale_inv torch.float64", x, s.double(), (128, 72), 1),
        ("not on the CPU", x.to("meta"), s, (128, 72), 1),
    ]
    for message, values, scales, groups, contract in refused:
        for pack in (amx.pack_left, amx.pack_right):
            with pytest.raises(ValueError, match=message):
                pack(values, scales, groups, contract=contract)
    with pytest.raises(ValueError, match="uint8"):
        amx.pack_left(x.byte(), s, (128, 72), contract=1)
    left = amx.pack_left(x, s, (128, 72), contract=1)
    with pytest.raises(ValueError, match=r"\[4, K\] in groups \(128, 72\), right .* \(72, 128\)"):
        amx.product(left, amx.pack_right(x, s, (72, 128), contract=1), torch.float32)
    with pytest.raises(ValueError, match="neither float32 nor bfloat16"):
        amx.product(left, amx.pack_right(x, s, (128, 72), contract=1), torch.float16)


@needs_amx
def test_kernel_brings_no_second_thread_pool():
    code = (
        "import torch; from fp8rl.numerics import amx; torch.set_num_threads(2)\n"
        "x, s = torch.ones(300, 300).bfloat16(), torch.ones(300, 1); x.float() @ x.float()\n"
        "threads = lambda: len(__import__('os').listdir('/proc/self/task')); before = threads()\n"
        "p = amx.pack_left(x, s, (300,), contract=1), amx.pack_right(x, s, (300,), contract=1)\n"
        "assert (amx.product(*p, torch.float32) == 300).all()\n"
        "maps = {l.split()[-1] for l in open('/proc/self/maps') if 'omp' in l.rpartition('/')[2]}\n"
        "assert len(maps) == 1, maps; assert threads() == before, (before, threads())"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr


def test_reasons_are_told_and_nothing_is_compiled_without_the_cpu(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(amx, "cpu_flags", lambda: {"avx512f"})
    assert str(amx._load()).startswith("this CPU has no AMX-BF16 (lacks amx_tile")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(amx, "cpu_flags", lambda: set(amx.AMX_FLAGS))
    with monkeypatch.context() as without:
        without.setattr(amx, "_thread_pool", lambda: None)
        assert "no GOMP_parallel" in str(amx._load())
    with monkeypatch.context() as without:
        without.setenv("PATH", "")
        assert amx._load() == "no C++ compiler (g++) found"


@needs_amx
def test_failed_compilation_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(amx, "_COMPILE", (*amx._COMPILE, "-mno-such-thing"))
    assert "cannot compile amx.cpp" in str(amx._load())
    assert not list((tmp_path / "fp8rl").iterdir())
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "cannot be kept or loaded" in str(amx._load())
