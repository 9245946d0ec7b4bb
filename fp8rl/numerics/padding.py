"""The one place that pads: tensors for tiled arithmetic, and token counts for FP8 kernels."""

import torch.nn.functional as F
from torch import Tensor

from fp8rl.numerics.formats import BLOCK, MX_GROUP, Scaling

_TOKENS = {Scaling.BLOCK: BLOCK, Scaling.MXFP8: MX_GROUP, Scaling.TENSOR: 16, Scaling.CHANNEL: 16}


def padded_size(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def token_multiple(
    scaling: Scaling,
    *,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    context_parallel: int = 1,
) -> int:
    """What the number of tokens in a batch must be a multiple of for FP8 tensor-core kernels.

    128 block-wise, 32 for MXFP8, 16 otherwise, for each rank's share: sequence parallelism cuts the
    tokens among the tensor-parallel ranks, context parallelism into two pieces for each rank.
    """
    shards = tensor_parallel if sequence_parallel else 1
    if context_parallel > 1:
        shards *= 2 * context_parallel
    return _TOKENS[scaling] * shards


def pad_dim(x: Tensor, dim: int, multiple: int) -> Tensor:
    """Zero-pads dimension `dim` of `x` at its end up to a multiple of `multiple`.

    Zeros change neither a tile's amax nor a product, so the caller crops the result and the
    arithmetic is that of the unpadded tensor. Returns `x` itself where nothing is missing.
    """
    missing = padded_size(x.shape[dim], multiple) - x.shape[dim]
    if missing == 0:
        return x
    dim = dim % x.dim()
    pads = [0, 0] * (x.dim() - dim - 1) + [0, missing]
    padded: Tensor = F.pad(x, pads)
    return padded
