"""The `torch` backend: what it hands to scaled_mm, and what comes back.

PyTorch's CPU build computes tensor and channel scaling for real. Block scaling exists on Hopper alone:
there `Strict` stands in for scaled_mm. It refuses what PyTorch or cuBLASLt would refuse on the card,
asks PyTorch's own shape rules besides, and multiplies what it was given, so that a scale in the wrong
place gives a wrong number. Tests marked `gpu` run the real kernels.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, scaled_mm

from fp8rl.numerics.backends import Backend, BackendError, FusedWeight, Projections, backend
from fp8rl.numerics.backends.scaled_mm import BACKEND, ScaledMm
from fp8rl.numerics.formats import Fp8Recipe, ScaleRule, Scaling, fp8_recipe
from fp8rl.numerics.linear import Fp8Weight, fp8_linear, quantise_parts
from fp8rl.numerics.quantise import NonFiniteError, Quantised, define
from infra import gpu_check

ROOT = Path(__file__).resolve().parents[2]
TOKENS = [1, 127, 128, 129, 1000]
BLOCKS = {
    "fp32": fp8_recipe(),
    "pow2": fp8_recipe(weights=ScaleRule.POW2, activations=ScaleRule.POW2),
}
PLAIN = {
    "tensor": fp8_recipe(Scaling.TENSOR),
    "tensor-hybrid": fp8_recipe(Scaling.TENSOR, hybrid=True),
    "channel": fp8_recipe(Scaling.CHANNEL),
    "channel-hybrid": fp8_recipe(Scaling.CHANNEL, hybrid=True),
}
# Same codes, same descales, FP32 sums in another order; a BF16 result is rounded once more.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}
# As in infra/gpu_check.py: the tensor cores keep fewer bits of a sum.
GPU_LIMITS = {torch.float32: 3e-3, torch.bfloat16: 6e-3}


def interleaved(heads: int, kv_heads: int, head_dim: int) -> Tensor:
    """`Projections.order` where each KV group has its query heads, its key and its value together."""
    q, k, v = [], [], []
    row = 0
    for _ in range(kv_heads):
        for rows, count in ((q, heads // kv_heads), (k, 1), (v, 1)):
            rows += range(row, row + count * head_dim)
            row += count * head_dim
    return torch.tensor(q + k + v)


@dataclass(frozen=True)
class Layout:
    """A fused layer. in_place: whether the block grid needs no gathering of rows or columns."""

    sizes: tuple[int, ...]
    columns: int
    order: Tensor | None = None
    in_place: bool = False

    def projections(self, device: str = "cpu") -> Projections:
        names = tuple(f"p{number}" for number in range(len(self.sizes)))
        return Projections(names, self.sizes, None if self.order is None else self.order.to(device))


LAYOUTS = {
    "one": Layout((256,), 640, in_place=True),  # five groups: padded to eight
    "one-ragged": Layout((200,), 200, in_place=True),
    "one-group": Layout((16,), 128, in_place=True),
    "last-ragged": Layout((256, 72), 384, in_place=True),
    "ragged": Layout((96, 200, 40), 136),
    "heads-of-24": Layout((144, 48, 48), 200, interleaved(6, 2, 24)),
    "heads-of-128": Layout((256, 256, 256), 256, interleaved(2, 2, 128), in_place=True),
    "torn-blocks": Layout(
        (256, 128), 256, torch.randperm(384, generator=torch.Generator().manual_seed(0))
    ),
}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Magnitudes that differ from row to row and column to column: a misplaced scale is far off."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    for size in ((shape[0], 1), (1, shape[1])):
        x *= torch.exp2(torch.randint(-5, 6, size, generator=generator).float())
    return x.to(dtype)


# ---- a scaled_mm for the CPU, as strict as the card's ------------------------------------------------


def ceil_div(size: int, by: int) -> int:
    return -(-size // by)


def require(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)


def pytorch_accepts(
    tensors: dict[str, Tensor], recipes: tuple[ScalingType, ScalingType], dtype
) -> None:
    """Asks PyTorch's shape rules for CUDA, with tensors that have shapes and strides but no data."""
    with FakeTensorMode():
        fake = {
            name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
            for name, t in tensors.items()
        }
        result = scaled_mm(
            fake["a"], fake["b"], fake["scale_a"], recipes[0], fake["scale_b"], recipes[1],
            output_dtype=dtype,
        )  # fmt: skip
    assert result.dtype is dtype


@dataclass
class Strict:
    """scaled_mm on the CPU: refuses what the card would, and multiplies the operands it was given.

    Rules: aten/src/ATen/native/cuda/ScaledBlas.cpp, and cuBLASLt's manual on block scaling. calls: the
    (M, N, K) of each product and its recipes. meta: ask PyTorch's own rules too.
    """

    calls: list[tuple[tuple[int, int, int], ScalingType, ScalingType]] = field(default_factory=list)
    meta: bool = True

    def __call__(
        self, a: Tensor, b: Tensor, scale_a: Tensor, recipe_a: ScalingType, scale_b: Tensor,
        recipe_b: ScalingType, *, output_dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        (m, k), n = a.shape, b.shape[1]
        self.calls.append(((m, n, k), recipe_a, recipe_b))
        require(b.shape[0] == k, "inner dimensions")
        require(a.stride() == (k, 1), "the left operand is row-major")
        require(b.stride() == (1, k), "the right operand is column-major")
        require(k % 16 == 0 and n % 16 == 0, "K and N are multiples of 16")
        require(output_dtype in (torch.float32, torch.bfloat16, torch.float16), "the result's dtype")
        elements = {torch.float8_e4m3fn, torch.float8_e5m2}
        require({a.dtype, b.dtype} <= elements, "FP8 operands")
        require({a.dtype, b.dtype} != {torch.float8_e5m2}, "no E5M2 with E5M2")
        for tensor in (a, b, scale_a, scale_b):
            require(tensor.data_ptr() % 16 == 0, "addresses of 16 bytes")
        require(scale_a.dtype == scale_b.dtype == torch.float32, "FP32 descales")
        blocks = {ScalingType.BlockWise1x128, ScalingType.BlockWise128x128}
        if {recipe_a, recipe_b} <= blocks:
            require(ScalingType.BlockWise1x128 in (recipe_a, recipe_b), "not 128x128 twice")
            require(a.dtype == b.dtype == torch.float8_e4m3fn, "E4M3 under block scales")
            require(m % 4 == 0 and n % 4 == 0, "M and N are multiples of 4")
            left = self._grouped(scale_a, recipe_a, m, k)
            right = self._grouped(scale_b, recipe_b, n, k)
        elif recipe_a == recipe_b == ScalingType.RowWise:
            require(scale_a.shape == (m, 1) and scale_a.stride() == (1, 1), "descales [M, 1]")
            require(scale_b.shape == (1, n) and scale_b.stride(1) == 1, "descales [1, N]")
            left, right = scale_a, scale_b.t()
        else:
            require(recipe_a == recipe_b == ScalingType.TensorWise, "a pair that has a kernel")
            require(scale_a.numel() == scale_b.numel() == 1, "one descale a side")
            left, right = scale_a, scale_b
        if self.meta:
            tensors = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b}
            pytorch_accepts(tensors, (recipe_a, recipe_b), output_dtype)
        return ((a.float() * left) @ (b.t().float() * right).t()).to(output_dtype)

    @staticmethod
    def _grouped(scale: Tensor, recipe: ScalingType, rows: int, k: int) -> Tensor:
        """Descales of an operand [rows, K], by element."""
        groups = ceil_div(k, 128)
        if recipe == ScalingType.BlockWise1x128:
            require(scale.shape == (rows, groups) and scale.stride() == (1, rows), "1x128 descales")
            return scale.repeat_interleave(128, 1)[:, :k]
        padded = ceil_div(groups, 4) * 4
        require(scale.shape == (padded, ceil_div(rows, 128)), "128x128 descales, padded to 4 groups")
        require(scale.stride() == (1, padded), "128x128 descales, group by group")
        return scale.t().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :k]


# ---- comparing with the reference --------------------------------------------------------------------


def fused(layout: Layout, recipe: Fp8Recipe, device: str = "cpu") -> FusedWeight:
    projections = layout.projections(device)
    weight = (random(sum(layout.sizes), layout.columns, seed=1) * 0.03).to(device)
    forward = quantise_parts(weight, projections, recipe.weight)
    turned = recipe.weight.turned()
    same = turned == recipe.weight
    backward = forward if same else quantise_parts(weight, projections, turned)
    return FusedWeight(projections, forward, backward)


def products(made: Backend, weight: FusedWeight, x: Tensor, dy: Tensor, recipe: Fp8Recipe) -> dict:
    prepared = made.prepare(weight)
    return {
        "forward": made.forward(x, prepared, recipe.input),
        "dgrad": made.dgrad(dy, prepared, recipe.gradient),
        "wgrad": made.wgrad(dy, x, recipe, weight.projections),
    }


def agrees(
    made: Backend, layout: Layout, tokens: int, recipe: Fp8Recipe, limits: dict, device: str = "cpu"
) -> None:
    """Holds the three products of `made` to the reference's, for FP32 and BF16 tensors."""
    weight = fused(layout, recipe, device)
    for dtype in limits:
        x = random(tokens, layout.columns, dtype=dtype, seed=2).to(device)
        dy = random(tokens, sum(layout.sizes), dtype=dtype, seed=3).to(device)
        got = products(made, weight, x, dy, recipe)
        want = products(backend("reference"), weight, x, dy, recipe)
        for name, expected in want.items():
            actual = got[name]
            assert actual.dtype is expected.dtype
            assert actual.shape == expected.shape
            assert actual.is_contiguous()
            error = (actual.double() - expected.double()).norm() / expected.double().norm()
            assert error <= limits[expected.dtype], (name, dtype, float(error))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_block_products_obey_the_card_and_agree_with_the_reference(layout, tokens):
    strict = Strict()
    agrees(ScaledMm(product=strict), layout, tokens, fp8_recipe(), LIMITS)
    # One product each for forward, dgrad and wgrad, whatever the projections, and twice: two dtypes.
    one, blocks = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    assert [call[1:] for call in strict.calls] == [(one, blocks), (one, blocks), (one, one)] * 2


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("recipe", [BLOCKS["pow2"], *PLAIN.values()], ids=["pow2", *PLAIN])
def test_products_of_other_recipes_obey_the_card_and_agree_with_the_reference(recipe, layout):
    agrees(ScaledMm(product=Strict()), layout, 33, recipe, LIMITS)


@pytest.mark.parametrize("tokens", [1, 17, 128])
@pytest.mark.parametrize("layout", ["one-ragged", "ragged", "heads-of-24"])
@pytest.mark.parametrize("recipe", PLAIN.values(), ids=PLAIN)
def test_tensor_and_channel_products_of_pytorch_itself_agree_with_the_reference(recipe, layout, tokens):
    agrees(BACKEND, LAYOUTS[layout], tokens, recipe, LIMITS)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_whole_blocks_are_multiplied_where_they_lie(layout):
    prepared = ScaledMm().prepare(fused(layout, fp8_recipe()))
    assert (prepared.places is None) == layout.in_place


def test_a_weight_that_is_not_trained_has_no_backward_operand():
    weight = fused(LAYOUTS["ragged"], fp8_recipe())
    made = ScaledMm(product=Strict())
    prepared = made.prepare(replace(weight, backward=None))
    assert prepared.backward == []
    assert made.forward(random(3, 136), prepared, fp8_recipe().input).shape == (3, 336)


@pytest.mark.parametrize("recipe", [*BLOCKS.values(), *PLAIN.values()], ids=[*BLOCKS, *PLAIN])
def test_linear_under_autograd_agrees_with_the_reference(recipe):
    layout = LAYOUTS["heads-of-24"]
    results = []
    for made in (backend("reference"), ScaledMm(product=Strict(meta=False))):
        fp8 = Fp8Weight(layout.projections(), recipe, made)
        x = random(2 * 9, layout.columns, seed=2).view(2, 9, -1).requires_grad_()
        master = random(240, layout.columns, seed=1).requires_grad_()
        y = fp8_linear(x, master, fp8)
        gradients = torch.autograd.grad(y, (x, master), random(18, 240, seed=3).view(2, 9, -1))
        results.append((y.detach(), *gradients))
    for want, got in zip(*results, strict=True):
        assert (got - want).norm() / want.norm() <= LIMITS[torch.float32]


def test_a_tensor_with_nan_is_refused_by_name():
    made = ScaledMm(product=Strict())
    prepared = made.prepare(fused(LAYOUTS["one"], fp8_recipe()))
    x, dy = random(5, 640), random(5, 256)
    dy[2, 3] = float("nan")
    with pytest.raises(NonFiniteError, match=r"output gradient: 1 of 1280 .* \(2, 3\)"):
        made.dgrad(dy, prepared, fp8_recipe().gradient)
    x[0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match="activation: 1 of 3200"):
        made.forward(x, prepared, fp8_recipe().input)


def operands(m: int = 32, n: int = 256, k: int = 256) -> dict:
    """Right operands and descales of a forward product."""
    return {
        "a": random(m, k).to(torch.float8_e4m3fn),
        "b": random(n, k).to(torch.float8_e4m3fn).t(),
        "scale_a": random(k // 128, m).t(),
        "recipe_a": ScalingType.BlockWise1x128,
        "scale_b": random(n // 128, 4).t(),
        "recipe_b": ScalingType.BlockWise128x128,
        "output_dtype": torch.float32,
    }


MISTAKES: dict[str, Callable[[dict], dict]] = {
    "the right operand row-major": lambda o: {"b": o["b"].contiguous()},
    "M not a multiple of 4": lambda o: operands(m=30),
    "N not a multiple of 16": lambda o: operands(n=264),
    "descales row by row": lambda o: {"scale_a": o["scale_a"].contiguous()},
    "groups not padded to 4": lambda o: {"scale_b": random(2, 2).t()},
    "padded groups, blocks first": lambda o: {"scale_b": o["scale_b"].contiguous()},
    "descales not transposed": lambda o: {"scale_b": o["scale_b"].t()},
    "E5M2": lambda o: {"a": o["a"].float().to(torch.float8_e5m2)},
    "128x128 twice": lambda o: {"recipe_a": ScalingType.BlockWise128x128},
    "BF16 descales": lambda o: {"scale_a": o["scale_a"].bfloat16()},
    "a view that is not aligned": lambda o: {"scale_a": random(2, 34).flatten()[1:65].view(2, 32).t()},
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_the_stand_in_refuses(mistake):
    Strict()(**operands())
    with pytest.raises(ValueError, match=r"\w"):
        Strict()(**(operands() | mistake(operands())))


# ---- refusals ----------------------------------------------------------------------------------------


def machine(monkeypatch, cuda: str | None = "13.0", devices: int = 1, capability=(9, 0)) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")


def test_hopper_computes_every_recipe_but_mxfp8_and_block_hybrid(monkeypatch):
    machine(monkeypatch)
    for recipe in (*BLOCKS.values(), *PLAIN.values()):
        BACKEND.check(recipe)
    with pytest.raises(BackendError, match=r"no MXFP8.*precision.scaling=block"):
        BACKEND.check(fp8_recipe(Scaling.MXFP8))
    with pytest.raises(BackendError, match=r"no E5M2 under block scales.*learner_format=e4m3"):
        BACKEND.check(fp8_recipe(hybrid=True))


@pytest.mark.parametrize(
    ("recipe", "here", "says"),
    [
        ("fp32", {"cuda": None}, "built without CUDA. Install a CUDA build"),
        ("tensor", {"cuda": None}, "built without CUDA"),
        ("fp32", {"devices": 0}, "PyTorch sees none"),
        ("fp32", {"cuda": "12.8"}, "needs cuBLASLt 12.9 .* built for CUDA 12.8"),
        ("channel", {"cuda": "12.6"}, "set precision.scaling=tensor"),
        ("fp32", {"capability": (10, 0)}, "Hopper .* this is a card .compute capability 10.0."),
        ("channel", {"capability": (8, 9)}, "Hopper"),
        ("tensor", {"capability": (8, 0)}, "8.9 or newer"),
    ],
)
def test_a_machine_that_cannot_is_told_why_and_what_to_do(monkeypatch, recipe, here, says):
    machine(monkeypatch, **here)
    with pytest.raises(BackendError, match=says):
        BACKEND.check((BLOCKS | PLAIN)[recipe])


def test_tensor_scaling_is_not_bound_to_hopper(monkeypatch):
    for here in ({"capability": (8, 9), "cuda": "12.6"}, {"capability": (10, 0)}):
        machine(monkeypatch, **here)
        BACKEND.check(PLAIN["tensor-hybrid"])


def test_the_backend_goes_by_the_name_torch():
    assert backend("torch") is BACKEND
    assert not BACKEND.use_triton


# ---- the Triton kernel, without a GPU ----------------------------------------------------------------

INTERPRETED = """
import itertools, torch
from fp8rl.numerics import triton_quantise
from fp8rl.numerics.elements import encode
from fp8rl.numerics.formats import E4M3, ScaleRule, Scaling, activation_scheme, weight_scheme
from fp8rl.numerics.quantise import NonFiniteError, define
from infra.gpu_check import edges, spread_out

torch.set_flush_denormal(False)
activation = activation_scheme(Scaling.BLOCK)
tiles = [activation, activation.turned(), weight_scheme(Scaling.BLOCK)]
tiles += [activation_scheme(Scaling.BLOCK, E4M3, ScaleRule.POW2)]
for scheme, dtype in itertools.product(tiles, (torch.float32, torch.bfloat16, torch.float16)):
    assert triton_quantise.covers(scheme)
    for x in (spread_out(130, 140, dtype), edges(130, 140, dtype), edges(140, 130, dtype).t()):
        values, scale_inv = define(x, scheme)
        got = triton_quantise.quantise(x, scheme)
        assert torch.equal(got.codes, encode(values, E4M3)), (scheme, dtype)
        assert torch.equal(got.scale_inv.contiguous().view(torch.int32), scale_inv.view(torch.int32))
    x[129, 3] = float("nan")
    try:
        triton_quantise.quantise(x, scheme, name="w")
    except NonFiniteError as error:
        assert str(error).startswith("w: 1 of 18200"), error
    else:
        raise AssertionError("a NaN went through")
assert not triton_quantise.covers(activation_scheme(Scaling.TENSOR))
print("same bits")
"""


def test_triton_kernel_has_the_bits_of_the_definition_in_its_interpreter():
    pytest.importorskip("triton")
    # The interpreter is chosen when Triton is imported, so it needs a process of its own.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert done.stdout == "same bits\n", done.stderr[-2000:]


@pytest.mark.parametrize("tile", [(1, 128), (128, 1), (128, 128)])
def test_triton_kernel_compiles_for_hopper_with_ieee_arithmetic(tile, tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fp8rl.numerics import triton_quantise

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = triton_quantise._kernel
    high, wide = triton_quantise._SHARES[tile]
    constants = {
        "HIGH": high, "WIDE": wide, "TALL": tile[0] == 128, "BROAD": tile[1] == 128, "POW2": False,
    }  # fmt: skip
    pointers = {"x": "*bf16", "codes": "*u8", "scale_inv": "*fp32", "bad": "*i32"}
    types = {name: "i32" for name in kernel.arg_names} | pointers | {"limit": "fp32", "largest": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=types, constexprs=places),
        target=GPUTarget("cuda", 90, 32),
        options={"enable_fp_fusion": False},
    )
    ptx = compiled.asm["ptx"]
    assert "div.rn.f32" in ptx
    for loose in (".ftz", ".approx", "div.full", "fma."):
        assert loose not in ptx, loose


# ---- infra/gpu_check.py ------------------------------------------------------------------------------


def test_gpu_check_runs_dry(tmp_path):
    table = tmp_path / "table.md"
    done = subprocess.run(
        [sys.executable, ROOT / "infra" / "gpu_check.py", "--cpu-dry-run", "--out", table],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = table.read_text()
    assert "All checks passed" in text
    assert "| channel, hybrid | plain |" in text


def test_gpu_check_says_that_there_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "--cpu-dry-run" in capsys.readouterr().out


def test_gpu_check_reports_what_is_wrong_and_goes_on(monkeypatch, tmp_path):
    def other_bits(x, scheme):
        values, scale_inv = define(x, scheme)
        return Quantised(values.byte(), scale_inv, scheme)

    few = list(gpu_check.schemes())[:2]
    monkeypatch.setattr(gpu_check, "schemes", lambda: iter(few))
    monkeypatch.setattr(gpu_check, "quantise", other_bits)
    monkeypatch.setattr(gpu_check, "triton_bits", lambda run: 1 / 0)
    monkeypatch.setattr(gpu_check, "RECIPES", {"channel": PLAIN["channel"]})
    monkeypatch.setitem(gpu_check.LIMITS, torch.float32, -1.0)
    table = tmp_path / "table.md"
    assert gpu_check.main(["--cpu-dry-run", "--out", str(table)]) == 1
    text = table.read_text()
    assert "FAILED**: the quantiser's bits on cpu differ" in text
    assert "FAILED**: Triton quantiser: the same bits: ZeroDivisionError" in text
    assert "FAILED**: channel (plain): wgrad is off by" in text
    assert "| channel | plain |" in text


def test_gpu_check_times_what_it_says(monkeypatch):
    """The timing sections with one call in place of a measurement, small, and Strict for the card."""
    strict = Strict(meta=False)
    monkeypatch.setattr("fp8rl.numerics.backends.scaled_mm.BACKEND", ScaledMm(product=strict))
    monkeypatch.setattr(gpu_check, "TIMED_TOKENS", 48)
    monkeypatch.setattr(gpu_check, "milliseconds", lambda body, seconds=0: (body(), 2.0)[1])
    small = [gpu_check.Layer("qkv", (512, 256, 256), 256, interleaved(4, 2, 128))]
    monkeypatch.setattr(gpu_check, "timed_layers", lambda: small)
    run = gpu_check.Run(torch.device("cpu"), gpu_check.Report(), True, float("inf"))
    gpu_check.linears(run)
    gpu_check.bandwidth(run)
    text = "\n".join(run.report.lines)
    assert run.report.failures == []
    assert "| qkv | 1024 x 256 | 2.000 (0) | 2.000 (0), 1.00x | 2.000 (0), 1.00x |" in text
    assert "| weight, 128x128, FP32, plain | " in text
    shapes = {shape for shape, *_ in strict.calls}
    assert shapes == {(128, 1024, 256), (128, 256, 1024), (1024, 256, 128)}


def test_gpu_check_times_the_layers_of_the_two_models():
    layers = gpu_check.timed_layers()
    shapes = [(sum(layer.sizes), layer.columns) for layer in layers]
    assert shapes == [
        (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (24576, 4096), (4096, 12288),
    ]  # fmt: skip
    assert torch.equal(layers[0].order, interleaved(32, 8, 128))


# ---- the real kernels --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("recipe", [*BLOCKS.values(), *PLAIN.values()], ids=[*BLOCKS, *PLAIN])
def test_products_on_the_card_agree_with_the_reference(recipe, layout, tokens):
    try:
        BACKEND.check(recipe)
    except BackendError as error:
        pytest.skip(str(error))
    agrees(BACKEND, layout, tokens, recipe, GPU_LIMITS, device="cuda")


@pytest.mark.gpu
def test_triton_kernel_on_the_card_agrees_with_the_reference():
    pytest.importorskip("triton")
    try:
        BACKEND.check(fp8_recipe())
    except BackendError as error:
        pytest.skip(str(error))
    made = replace(BACKEND, use_triton=True)
    for layout in LAYOUTS.values():
        agrees(made, layout, 129, fp8_recipe(), GPU_LIMITS, device="cuda")
