"""The FP8 linear: its three products against the oracle's, on every backend that runs here."""

from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8rl.numerics.backends import Backend, BackendError, Projections, backend
from fp8rl.numerics.formats import Fp8Recipe, ScaleRule, Scaling, fp8_recipe
from fp8rl.numerics.linear import Fp8Weight, fp8_linear
from fp8rl.numerics.quantise import NonFiniteError
from tests import oracle
from tests.unit.test_numerics import ieee  # noqa: F401 (a fixture of this module too)

K = 200
ONE = (130,)
FUSED = (128, 130, 64)
BACKENDS = [name for name in ("reference", "amx") if find_spec(f"fp8rl.numerics.backends.{name}")]
RULES = {"fp32": (False, False), "pow2": (True, True), "pow2 weights": (True, False)}
# FP32 sums, of operands rounded to FP32 once more: relative to the norms of the two vectors.
FP32_SUM = 2.0**-20
# Half a unit in the last place of the result's dtype: relative, and of the smallest numbers.
ROUNDING = {
    torch.float32: (0.0, 0.0),
    torch.bfloat16: (2.0**-8, 0.0),
    torch.float16: (2.0**-11, 2.0**-25),
}


def chosen(name: str, recipe: Fp8Recipe) -> Backend:
    try:
        found = backend(name)
        found.check(recipe)
    except BackendError as reason:
        pytest.skip(str(reason))
    return found


@dataclass
class Layer:
    """A fused weight in a permuted row order, with what goes in and comes back."""

    sizes: tuple[int, ...]
    mode: str = "block"
    rule: str = "fp32"
    hybrid: bool = False
    dtype: torch.dtype = torch.float32
    backend: str = "reference"
    parts: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        # Projections of very different size: a scale shared by two of them would show.
        self.parts = [
            torch.randn(n, K, generator=generator) * 0.1 * 4.0**-i for i, n in enumerate(self.sizes)
        ]
        self.rows = sum(self.sizes)
        order = torch.randperm(self.rows, generator=generator) if len(self.sizes) > 1 else None
        names = tuple(f"layer.{i}" for i in range(len(self.sizes)))
        self.projections = Projections(names, self.sizes, order)
        self.order = np.arange(self.rows) if order is None else order.numpy()
        pow2 = [ScaleRule.POW2 if on else ScaleRule.FP32 for on in RULES[self.rule]]
        self.recipe = fp8_recipe(
            Scaling(self.mode), weights=pow2[0], activations=pow2[1], hybrid=self.hybrid
        )
        self.fp8 = Fp8Weight(self.projections, self.recipe, chosen(self.backend, self.recipe))
        self.weight = torch.nn.Parameter(self.projections.join(self.parts))

    def batch(self, tokens: int) -> tuple[Tensor, Tensor]:
        """(x, dy), with tokens of different size."""
        generator = torch.Generator().manual_seed(tokens)
        sizes = torch.exp2(torch.randint(-3, 4, (tokens, 1), generator=generator).float())
        x = torch.randn(tokens, K, generator=generator) * sizes
        dy = torch.randn(tokens, self.rows, generator=generator) * 0.01 * sizes.flip(0)
        return x.to(self.dtype), dy.to(self.dtype)

    def run(self, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
        """The output and both gradients."""
        x = x.detach().requires_grad_()
        self.weight.grad = None
        y = fp8_linear(x, self.weight, self.fp8)
        y.backward(dy)
        assert x.grad is not None
        assert self.weight.grad is not None
        return {"y": y.detach(), "dx": x.grad, "dw": self.weight.grad.clone()}

    def products(self, tokens: int) -> dict[str, "Product"]:
        return products(self.sizes, self.mode, self.rule, self.hybrid, self.dtype, tokens)


@dataclass(frozen=True)
class Product:
    """What the oracle says of A @ B."""

    want: np.ndarray
    tolerance: np.ndarray
    """Of FP32 sums."""
    distance: float
    """The largest difference from the product of the unquantised operands."""
    length: int
    """Of the contraction."""

    def assert_equal(self, got: Tensor) -> None:
        """`got` is the product up to FP32 sums and the rounding to its dtype."""
        rounding, smallest = ROUNDING[got.dtype]
        tolerance = self.tolerance + rounding * np.abs(self.want) + smallest
        worst = (np.abs(got.double().numpy() - self.want) - tolerance).max()
        assert worst <= 0, f"off by {worst} more than allowed, of {np.abs(self.want).max()}"
        # The unquantised product is another thing: the comparison can fail. (Not where each tile
        # along the contraction is one element: its value is then the largest one, and exact.)
        far = 100 if got.dtype is torch.float32 else 4
        assert self.distance > far * tolerance.max() or self.length == 1


@lru_cache(maxsize=2)  # the backends, which follow one another, share it
def products(sizes, mode, rule, hybrid, dtype, tokens) -> dict[str, Product]:
    """The oracle's products of `Layer` with these settings and its batch of `tokens`."""
    layer = Layer(sizes, mode, rule, hybrid, dtype)
    x, dy = layer.batch(tokens)
    operands = oracle.linear_operands(
        x.float().numpy(),
        [part.numpy() for part in layer.parts],
        dy.float().numpy(),
        layer.order,
        mode,
        hybrid=hybrid,
        pow2=RULES[rule],
        dtype=str(dtype).removeprefix("torch."),
    )
    w, x, dy = layer.weight.detach(), x.float(), dy.float()
    unquantised = {"y": x @ w.t(), "dx": dy @ w, "dw": dy.t() @ x}
    found = {}
    for name, (a, b) in operands.items():
        want = a @ b
        tolerance = FP32_SUM * np.outer(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=0))
        distance = np.abs(want - unquantised[name].numpy()).max()
        found[name] = Product(want, tolerance, float(distance), a.shape[1])
    return found


def check(layer: Layer, tokens: int) -> None:
    got = layer.run(*layer.batch(tokens))
    for name, product in layer.products(tokens).items():
        assert got[name].dtype is (torch.float32 if name == "dw" else layer.dtype)
        product.assert_equal(got[name])


# --- the three products


SETTINGS = [
    (str(mode), rule, hybrid)
    for mode in Scaling
    for rule in (RULES if mode is not Scaling.MXFP8 else ["fp32"])
    for hybrid in ((False, True) if rule != "pow2 weights" else (False,))
]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("sizes", [ONE, FUSED], ids=["one", "fused"])
@pytest.mark.parametrize(("mode", "rule", "hybrid"), SETTINGS)
def test_output_and_gradients_equal_the_oracle(name, mode, rule, hybrid, sizes, tokens):
    check(Layer(sizes, mode, rule, hybrid, backend=name), tokens)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("hybrid", [False, True], ids=["e4m3", "hybrid"])
@pytest.mark.parametrize("mode", [str(mode) for mode in Scaling])
def test_half_precision_activations(name, mode, hybrid, dtype):
    check(Layer(FUSED, mode, hybrid=hybrid, dtype=dtype, backend=name), 129)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("sizes", [(128, 256), (1,), (1, 1, 129)], ids=str)
def test_sizes_on_and_off_the_grid(sizes, name):
    for mode in Scaling:
        check(Layer(sizes, str(mode), backend=name), 33)


@pytest.mark.parametrize("name", BACKENDS)
def test_layouts_and_batch_dimensions(name):
    layer = Layer(FUSED, backend=name)
    x, dy = layer.batch(30)
    want = layer.run(x, dy)
    shaped = layer.run(x.view(5, 6, K), dy.view(5, 6, -1))
    assert shaped["y"].shape == (5, 6, layer.rows)
    assert shaped["dx"].shape == (5, 6, K)
    for key, value in want.items():
        assert torch.equal(shaped[key].view_as(value), value)
    x_t, dy_t = x.t().contiguous().t(), dy.t().contiguous().t()
    assert not x_t.is_contiguous()
    turned = layer.run(x_t, dy_t)
    for key, value in want.items():
        assert torch.equal(turned[key], value)
    x.requires_grad_()
    fp8_linear(x, layer.weight, layer.fp8).sum().backward()  # its gradient is one number, expanded
    assert torch.equal(x.grad, layer.run(x, torch.ones_like(dy))["dx"])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("mode", [str(mode) for mode in Scaling])
def test_no_tokens(mode, name):
    """An expert that no token went to."""
    layer = Layer(FUSED, mode, backend=name)
    got = layer.run(torch.empty(0, K), torch.empty(0, layer.rows))
    assert got["y"].shape == (0, layer.rows)
    assert got["dx"].shape == (0, K)
    assert torch.equal(got["dw"], torch.zeros(layer.rows, K))


@pytest.mark.parametrize("name", BACKENDS)
def test_only_the_gradients_asked_for(name):
    layer = Layer(ONE, backend=name)
    x, dy = layer.batch(3)
    want = layer.run(x, dy)
    fp8_linear(x, layer.weight, layer.fp8).backward(dy)
    assert torch.equal(layer.weight.grad, 2 * want["dw"])
    layer.weight.requires_grad_(False)
    x.requires_grad_()
    fp8_linear(x, layer.weight, layer.fp8).backward(dy)
    assert torch.equal(x.grad, want["dx"])
    with torch.no_grad():
        assert torch.equal(fp8_linear(x, layer.weight, layer.fp8), want["y"])
    with torch.inference_mode():
        assert torch.equal(fp8_linear(x, layer.weight, layer.fp8), want["y"])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("mode", [str(mode) for mode in Scaling])
def test_padding_tokens_do_not_change_the_gradient_of_the_weight(mode, name):
    """Rows of dy that are zero, at the end: huge activations there do not reach a shared scale."""
    layer = Layer(FUSED, mode, backend=name)
    x, dy = layer.batch(1000)
    padding = torch.full((24, K), 1e4)
    padded_x, padded_dy = (
        torch.cat([x.detach(), padding]),
        torch.cat([dy, -torch.zeros(24, layer.rows)]),
    )
    got = layer.run(padded_x, padded_dy)
    layer.products(1000)["dw"].assert_equal(got["dw"])
    assert torch.equal(got["dx"][1000:], torch.zeros(24, K))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", BACKENDS)
def test_non_finite_operands_are_refused_by_name(name, bad):
    for mode in Scaling:
        layer = Layer(FUSED, str(mode), backend=name)
        x, dy = layer.batch(4)
        broken = x.clone()
        broken[2, 5] = bad
        with pytest.raises(NonFiniteError, match=r"activation: 1 of 800 values .* \(2, 5\)"):
            layer.run(broken, dy)
        broken = dy.clone()
        broken[1, 0] = broken[3, 7] = bad
        with pytest.raises(NonFiniteError, match=r"output gradient: \d of "):
            layer.run(x, broken)
        with torch.no_grad():
            layer.weight[layer.order[128 + 9], 150] = bad  # row 9 of the second projection
        with pytest.raises(NonFiniteError, match=r"layer\.1: 1 of 26000 values .* \(9, 150\)"):
            layer.run(x, dy)


# --- projections and backends


def test_projections_split_and_join_are_inverse():
    layer = Layer(FUSED)
    x = torch.randn(layer.rows, 3)
    assert torch.equal(layer.projections.join(layer.projections.split(x)), x)
    columns = x.t().contiguous()
    parts = layer.projections.split_columns(columns)
    assert [part.shape[1] for part in parts] == list(FUSED)
    assert torch.equal(layer.projections.join_columns(parts), columns)
    for part, want in zip(layer.projections.split(layer.weight), layer.parts, strict=True):
        assert torch.equal(part, want)


def test_unknown_backend_is_refused():
    with pytest.raises(BackendError, match="no FP8 backend 'tpu'; there are reference, amx"):
        backend("tpu")
