"""The one place that pads a tensor for block-scaled arithmetic."""

import torch
import torch.nn.functional as F
from torch import Tensor


def padded_size(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def pad_dim(x: Tensor, dim: int, multiple: int) -> Tensor:
    """Zero-pads dimension `dim` of `x` at its end up to a multiple of `multiple`.

    Zeros change neither a block's amax nor a product, so the caller crops the result and the
    arithmetic is that of the unpadded tensor. Returns `x` itself where nothing is missing.
    """
    missing = padded_size(x.shape[dim], multiple) - x.shape[dim]
    if missing == 0:
        return x
    dim = dim % x.dim()
    pads = [0, 0] * (x.dim() - dim - 1) + [0, missing]
    padded: Tensor = F.pad(x, pads)
    return padded


def split_groups(x: Tensor, group: int) -> Tensor:
    """`x` [..., K] as [..., ceil(K / group), group], zero-padded at the end of K."""
    return torch.unflatten(pad_dim(x, -1, group), -1, (-1, group))
