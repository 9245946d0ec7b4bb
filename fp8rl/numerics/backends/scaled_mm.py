"""FP8 products on the tensor cores with nothing but PyTorch: torch.nn.functional.scaled_mm (Hopper).

The quantiser is fp8rl's own, so codes and descales are the reference's to the bit; only the products
differ, by the order and the width of the tensor cores' sums.

What scaled_mm takes, and who says so. [S] is PyTorch's aten/src/ATen/native/cuda/ScaledBlas.cpp (the
code of _scaled_mm_v2, which scaled_mm calls) with the ScaledBlasUtils.cpp it shares; the rules are the
same in its states before and after 2.13. [M] is _check_scaled_mm_sizes_v2 in PyTorch 2.13's
torch/_meta_registrations.py, [C] is cuda/CUDABlas.cpp (get_scale_mode), [L] is cuBLASLt's manual, on
128-element 1D and 128x128 2D block scaling.

    operands     left [M, K] row-major, right [K, N] column-major: K is contiguous in both [M]; on
                 SM90 no other order [S: _scaled_gemm]. K and N are multiples of 16, M is free [S, M]
    elements     E4M3 or E5M2, not E5M2 on both sides [S]; E4M3 alone under block scales
                 [S: check_deepseek_recipe]
    1x128        descales FP32 [rows, ceil(K / 128)], strides (1, rows), on either side [S]; M and N
                 multiples of 4, addresses of 16 bytes [L]
    128x128      descales FP32 [L4, ceil(rows / 128)], strides (1, L4), where L4 is ceil(K / 128)
                 rounded up to a multiple of 4 [S, L]; [M] takes floors of K / 128 and N / 128
    pairs        1x128 with 128x128 (forward, dgrad), 1x128 with 1x128 (wgrad); never 128x128 twice
                 [S: scale_kernel_dispatch, L]
    a row        descales FP32 [M, 1] left, [1, N] right, the last stride 1 [S, M]
    a tensor     one FP32 descale a side [S]
    sums         FP32; no fast accumulation under block scales [C]; the result is FP32, BF16 or FP16 [L]
    machine      block: compute capability 9.x and cuBLASLt >= 12.9 [S: _check_deepseek_support]; a row:
                 CUDA >= 12.9 [C], and FP32 results on 9.x alone [S: _scaled_rowwise_rowwise]; a tensor:
                 8.9 or newer [S]

Under block scales everything is padded to multiples of 128, which meets all of that and is what
PyTorch's own tests run. torch._scaled_mm, the older call, guesses the scaling from shapes, with another
rule for 128x128 (no padding to L4): not used.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from fp8rl.numerics.backends import (
    GRADIENT,
    BackendError,
    FusedWeight,
    Projections,
    along_outputs,
    along_tokens,
)
from fp8rl.numerics.elements import DTYPES
from fp8rl.numerics.formats import BLOCK, E4M3, Fp8Recipe, ScaleRule, Scheme, Tile
from fp8rl.numerics.padding import pad_dim, padded_size
from fp8rl.numerics.quantise import Quantised, quantise

_ALIGNED = 16  # rows and depth of an operand that has no blocks
_SCALES_ALIGNED = 4  # groups of an operand in 128x128 blocks

_RECIPES: dict[Tile, ScalingType] = {
    (1, BLOCK): ScalingType.BlockWise1x128,
    (BLOCK, BLOCK): ScalingType.BlockWise128x128,
    (1, None): ScalingType.RowWise,
    (None, None): ScalingType.TensorWise,
}


def _column_major(x: Tensor) -> Tensor:
    """`x` [R, C] with strides (1, R) exactly, also where a dimension has size 1."""
    strides = (1, x.shape[0])
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


@dataclass(frozen=True)
class _Operand:
    """One side of a product, ready for scaled_mm.

    codes: float8 [R', D'], contiguous; D' is contracted. R' and D' are padded with zeros, which add
    nothing. rows: R. tile: of `codes`. scale_inv: FP32 descales of all of R', laid out by tile.
    """

    codes: Tensor
    scale_inv: Tensor
    tile: Tile
    rows: int

    @property
    def recipe(self) -> ScalingType:
        return _RECIPES[self.tile]


def _operand(q: Quantised, *, over_rows: bool = False) -> _Operand:
    """`q` [R, D] for a product over D; over_rows: `q` [D, R], contracted over its rows."""
    codes, scale_inv, tile = q.codes, q.scale_inv, q.scheme.tile
    if over_rows:
        codes, scale_inv, tile = codes.t(), scale_inv.t(), (tile[1], tile[0])
    rows = codes.shape[0]
    multiple = BLOCK if BLOCK in tile else _ALIGNED
    codes = pad_dim(pad_dim(codes, 0, multiple), 1, multiple).contiguous()
    if tile == (1, BLOCK):
        scale_inv = _column_major(pad_dim(scale_inv, 0, multiple))
    elif tile == (BLOCK, BLOCK):
        scale_inv = _column_major(pad_dim(scale_inv, 1, _SCALES_ALIGNED).t())
    elif tile == (1, None):
        scale_inv = pad_dim(scale_inv.flatten(), 0, multiple)
    return _Operand(codes.view(DTYPES[q.scheme.element]), scale_inv, tile, rows)


@dataclass(frozen=True)
class _Prepared:
    """A fused weight as right operands.

    forward: one operand with the rows of all projections, or one for each (tensor scales). backward:
    one for all (blocks), or one for each; empty where nothing is trained. places: int64 [N], the row
    of the one operand that holds each fused row; None where it is the row of the same number.
    """

    projections: Projections
    forward: list[_Operand]
    backward: list[_Operand]
    places: Tensor | None


def _lay_out(parts: list[Quantised]) -> Quantised:
    """Projections in 128x128 blocks one below the other, each from a block's edge on: [N', K]."""
    return Quantised(
        torch.cat([pad_dim(part.codes, 0, BLOCK) for part in parts]),
        torch.cat([part.scale_inv for part in parts]),
        parts[0].scheme,
    )


def _in_order(
    grids: list[Quantised], projections: Projections
) -> tuple[list[Quantised], Tensor | None]:
    """`grids` [N', K] of `_lay_out` in fused order, as far as whole blocks go: (grids, places).

    places: as in `_Prepared`; not None where fused order would tear blocks apart.
    """
    runs, start = [], 0
    for size in projections.sizes:
        runs.append(torch.arange(start, start + size, device=grids[0].codes.device))
        start += padded_size(size, BLOCK)
    places = projections.join(runs)
    size = len(places)
    if torch.equal(places, torch.arange(size, device=places.device)):
        return [Quantised(grid.codes[:size], grid.scale_inv, grid.scheme) for grid in grids], None
    if size == start:
        # Megatron's order moves whole blocks where heads have 128 rows: the weight takes that order.
        blocks = places.view(-1, BLOCK)
        first = blocks[:, :1]
        steps = torch.arange(BLOCK, device=places.device)
        if bool((first % BLOCK == 0).all()) and torch.equal(blocks, first + steps):
            return [_take_blocks(grid, first.flatten() // BLOCK) for grid in grids], None
    return grids, places


def _take_blocks(q: Quantised, blocks: Tensor) -> Quantised:
    """`q` [N', K] with its 128-row blocks in the order `blocks`."""
    codes = q.codes.unflatten(0, (-1, BLOCK)).index_select(0, blocks).flatten(0, 1)
    return Quantised(codes, q.scale_inv.index_select(0, blocks), q.scheme)


@dataclass
class ScaledMm:
    """FP8 products by scaled_mm.

    product: what computes them; a test puts another in its place. use_triton: quantise activations
    and gradients on CUDA by the Triton kernel (triton_quantise.py), whose bits infra/gpu_check.py
    compares; nothing switches it on by itself.
    """

    product: Callable[..., Tensor] = scaled_mm
    use_triton: bool = False

    def check(self, recipe: Fp8Recipe) -> None:
        """Raises BackendError where `recipe` has no kernel, or this machine cannot run it."""
        tile = recipe.weight.tile
        if recipe.weight.rule is ScaleRule.UE8M0:
            raise BackendError(
                "the torch backend has no MXFP8: its kernels need Blackwell and swizzled scales. Set "
                "precision.scaling=block, or precision.backend=transformer_engine on Blackwell"
            )
        block = tile == (BLOCK, BLOCK)
        if block and any(s.element != E4M3 for s in (recipe.weight, recipe.input, recipe.gradient)):
            raise BackendError(
                "the torch backend has no E5M2 under block scales: PyTorch takes E4M3 alone there. Set "
                "precision.learner_format=e4m3, or precision.scaling=channel or tensor"
            )
        if torch.version.cuda is None:
            raise BackendError(
                f"the torch backend runs on an NVIDIA GPU, and PyTorch {torch.__version__} is built "
                "without CUDA. Install a CUDA build, or set precision.backend=reference"
            )
        if not torch.cuda.is_available():
            raise BackendError(
                "the torch backend runs on an NVIDIA GPU, and PyTorch sees none (driver, "
                "CUDA_VISIBLE_DEVICES?). Set precision.backend=reference to run without"
            )
        capability = torch.cuda.get_device_capability()
        name = f"{torch.cuda.get_device_name()} (compute capability {capability[0]}.{capability[1]})"
        if tile == (None, None):
            if capability < (8, 9):
                raise BackendError(
                    f"the torch backend needs compute capability 8.9 or newer for FP8; this is {name}"
                )
            return
        if capability[0] != 9:
            raise BackendError(
                "the torch backend scales by blocks and channels on Hopper (9.x) alone; this is "
                f"{name}. Set precision.scaling=tensor, or precision.backend=transformer_engine"
            )
        if _version(torch.version.cuda) < (12, 9):
            raise BackendError(
                "the torch backend needs cuBLASLt 12.9 for block and channel scales; PyTorch "
                f"{torch.__version__} is built for CUDA {torch.version.cuda}. Install a build for CUDA "
                "12.9 or newer, or set precision.scaling=tensor"
            )

    def prepare(self, weight: FusedWeight) -> _Prepared:
        """The operands of `weight`, on the device of its codes."""
        forward, backward, projections = weight.forward, weight.backward, weight.projections
        tile = forward[0].scheme.tile
        if tile == (BLOCK, BLOCK):
            return self._prepare_blocks(weight)
        turned = [_operand(part, over_rows=True) for part in backward or []]
        if tile == (1, None):
            # A row brings its own scale along, so rows of all projections make one operand.
            whole = Quantised(
                projections.join([part.codes for part in forward]),
                projections.join([part.scale_inv for part in forward]),
                forward[0].scheme,
            )
            return _Prepared(projections, [_operand(whole)], turned, None)
        return _Prepared(projections, [_operand(part) for part in forward], turned, None)

    def _prepare_blocks(self, weight: FusedWeight) -> _Prepared:
        """One grid for all projections: it is exact to pad each of them to whole blocks with zeros."""
        grids = [_lay_out(weight.forward)]
        if weight.backward is not None:
            same = weight.backward is weight.forward
            grids.append(grids[0] if same else _lay_out(weight.backward))
        grids, places = _in_order(grids, weight.projections)
        turned = [_operand(grid, over_rows=True) for grid in grids[1:]]
        return _Prepared(weight.projections, [_operand(grids[0])], turned, places)

    def forward(self, x: Tensor, prepared: _Prepared, scheme: Scheme) -> Tensor:
        """q(x) . Wq^T: x [T, K] -> [T, N] in x's dtype. Raises NonFiniteError."""
        left = _operand(self._quantise(x, scheme, "activation"))
        parts = [self._multiply(left, right, x.dtype) for right in prepared.forward]
        if left.tile == (None, None):
            return prepared.projections.join_columns(parts)
        if prepared.places is not None:
            return parts[0].index_select(1, prepared.places)
        return parts[0]

    def dgrad(self, dy: Tensor, prepared: _Prepared, scheme: Scheme) -> Tensor:
        """q(dy) . Wq: dy [T, N] -> [T, K] in dy's dtype. Raises NonFiniteError.

        Groups lie over each projection by itself. Where they cannot share an operand, the products
        of the projections are summed in FP32.
        """
        assert prepared.backward, "prepared without a backward weight"
        if scheme.tile == (1, BLOCK):
            parts = [self._in_place(dy, prepared)]
        else:
            parts = along_outputs(dy, scheme, prepared.projections)
        dtype = dy.dtype if len(parts) == 1 else torch.float32
        products = [
            self._multiply(_operand(self._quantise(part, scheme, GRADIENT)), right, dtype)
            for part, right in zip(parts, prepared.backward, strict=True)
        ]
        total = products[0]
        for product in products[1:]:
            total = total.add_(product)
        return total.to(dy.dtype)

    @staticmethod
    def _in_place(dy: Tensor, prepared: _Prepared) -> Tensor:
        """`dy` [T, N] with its columns where the weight has its rows: [T, N'] or, in order, [T, N]."""
        if prepared.places is None:
            return dy
        width = prepared.forward[0].codes.shape[0]
        return dy.new_zeros(dy.shape[0], width).index_copy_(1, prepared.places, dy)

    def wgrad(self, dy: Tensor, x: Tensor, recipe: Fp8Recipe, projections: Projections) -> Tensor:
        """q(dy)^T . q(x): dy [T, N], x [T, K] -> FP32 [N, K] in fused order. Raises NonFiniteError."""
        scheme = recipe.gradient.turned()
        turned = self._quantise(x, recipe.input.turned(), "activation")
        right = _operand(turned, over_rows=True)
        products = [
            self._multiply(
                _operand(self._quantise(part, scheme, GRADIENT), over_rows=True), right, torch.float32
            )
            for part in along_tokens(dy, scheme, projections)
        ]
        return products[0] if len(products) == 1 else projections.join(products)

    def _quantise(self, x: Tensor, scheme: Scheme, name: str) -> Quantised:
        if self.use_triton and x.is_cuda:
            from fp8rl.numerics import triton_quantise

            if triton_quantise.covers(scheme):
                return triton_quantise.quantise(x, scheme, name=name)
        return quantise(x, scheme, name=name)

    def _multiply(self, left: _Operand, right: _Operand, dtype: torch.dtype) -> Tensor:
        """[R left, R right] in `dtype`, contiguous."""
        left_scale, right_scale = left.scale_inv, right.scale_inv
        if left.tile == (1, None):
            left_scale, right_scale = left_scale.unsqueeze(1), right_scale.unsqueeze(0)
        y = self.product(
            left.codes,
            right.codes.t(),
            left_scale,
            left.recipe,
            right_scale,
            right.recipe,
            output_dtype=dtype,
        )
        return y[: left.rows, : right.rows].contiguous()


def _version(text: str) -> tuple[int, ...]:
    """Major and minor of a version: "12.9" gives (12, 9)."""
    return tuple(int(part) for part in text.split(".")[:2])


BACKEND = ScaledMm()
