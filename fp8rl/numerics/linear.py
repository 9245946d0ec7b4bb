"""The FP8 linear: one block-scaled product forward, two backward.

    forward  y  = q(x along K)      . Wq^T
    dgrad    dx = q(dy along N)     . Wq
    wgrad    dW = q(dy along T)^T   . q(x along T)

T tokens, K inputs, N outputs. Every operand is quantised along the axis that its product contracts,
from the high-precision tensor (a transposed copy is quantised again, not transposed), and sums are
FP32. What computes the products is a backend (fp8rl/numerics/backends).

A layer may hold several Hugging Face projections fused, and in another row order (Megatron
interleaves q, k, v per KV group). Tiles and gradient groups lie over each projection by itself, in
its own order, so that the learner's codes are those of the published weights.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8rl.numerics.backends import Backend, FusedWeight, Projections
from fp8rl.numerics.formats import Fp8Recipe, Scheme
from fp8rl.numerics.quantise import NonFiniteError, Quantised, quantise


def quantise_parts(weight: Tensor, projections: Projections, scheme: Scheme) -> list[Quantised]:
    """Each projection of a fused `weight` [N, K] quantised by itself, under its own name."""
    parts = projections.split(weight.detach())
    return [
        quantise(part, scheme, name=name) for name, part in zip(projections.names, parts, strict=True)
    ]


class Fp8Weight:
    """A layer's weight in FP8, quantised once per change of the master weight.

    The master weight's version counter tells when it changed. Writes that do not count there are not
    to be used on it: through `.data`, and those of torch's fused optimisers (foreach ones count).
    """

    def __init__(self, projections: Projections, recipe: Fp8Recipe, backend: Backend) -> None:
        self.projections = projections
        self.recipe = recipe
        self.backend = backend
        # Held, so that its memory cannot become another weight's: address and version name a state.
        self._held: Tensor | None = None
        self._version = -1
        self._forward: list[Quantised] = []
        self._prepared: Any = None

    def _update(self, weight: Tensor) -> None:
        same_memory = self._held is not None and self._held.data_ptr() == weight.data_ptr()
        if same_memory and self._version == weight._version:
            return
        scheme = self.recipe.weight
        forward = quantise_parts(weight, self.projections, scheme)
        turned = scheme.turned()
        backward = forward if turned == scheme else quantise_parts(weight, self.projections, turned)
        self._prepared = self.backend.prepare(FusedWeight(self.projections, forward, backward))
        self._forward = forward
        self._held, self._version = weight.detach(), weight._version

    def prepared(self, weight: Tensor) -> Any:
        """What the backend needs for the products with the current `weight`."""
        self._update(weight)
        return self._prepared

    def quantised(self, weight: Tensor) -> dict[str, Quantised]:
        """Codes and descales by projection name: what the forward product contracts with."""
        self._update(weight)
        return dict(zip(self.projections.names, self._forward, strict=True))


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fp8: Fp8Weight) -> Tensor:
        x_TK = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(x_TK, weight)
        ctx.fp8, ctx.x_shape = fp8, x.shape
        if not len(x_TK):  # an expert that no token was sent to
            return x.new_empty(*x.shape[:-1], len(weight))
        prepared = fp8.prepared(weight)
        try:
            with torch.autocast(x.device.type, enabled=False):
                y_TN = fp8.backend.forward(x_TK, prepared, fp8.recipe.input)
        except NonFiniteError as error:
            raise error.of(fp8.projections.label) from None
        return y_TN.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (dy,) = grads
        x_TK, weight = ctx.saved_tensors
        fp8: Fp8Weight = ctx.fp8
        dy_TN = dy.reshape(-1, dy.shape[-1])
        if not len(x_TK):
            return x_TK.new_empty(ctx.x_shape), torch.zeros_like(weight), None
        dx = dw = None
        try:
            with torch.autocast(dy.device.type, enabled=False):
                if ctx.needs_input_grad[0]:
                    dx = fp8.backend.dgrad(dy_TN, fp8.prepared(weight), fp8.recipe.gradient)
                    dx = dx.to(x_TK.dtype).view(ctx.x_shape)
                if ctx.needs_input_grad[1]:
                    x_TK = _where_trained(x_TK, dy_TN)
                    dw = fp8.backend.wgrad(dy_TN, x_TK, fp8.recipe, fp8.projections)
                    dw = dw.to(weight.dtype)
        except NonFiniteError as error:
            raise error.of(fp8.projections.label) from None
        return dx, dw, None


def _where_trained(x_TK: Tensor, dy_TN: Tensor) -> Tensor:
    """`x` with zeros for tokens without gradient (padding).

    They add nothing to the weight's gradient, but would share a scale with tokens that do.
    """
    trained = dy_TN.abs().amax(1, keepdim=True) != 0
    return x_TK if bool(trained.all()) else torch.where(trained, x_TK, torch.zeros_like(x_TK))


def fp8_linear(x: Tensor, weight: Tensor, fp8: Fp8Weight) -> Tensor:
    """y = x W^T with FP8 operands in all three products.

    x: [..., K], BF16, FP16 or FP32; under autocast it is cast as torch's own linear casts it.
    weight: the FP32 master [N, K]; its gradient comes back in its dtype. Returns [..., N] in x's
    dtype. Raises NonFiniteError where an operand holds NaN or Inf.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    result: Tensor = _Fp8Linear.apply(x, weight, fp8)
    return result
