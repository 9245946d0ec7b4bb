"""Rewards and samples before training: the parts of DAPO (arXiv 2503.14476) that are pure decisions.

Raw rewards are what verifiers gave; shaped ones are what advantages are made of. Both are logged.
Dynamic sampling is in fp8rl/rollout/dynamic_sampling.py: the process that decides it has no torch.
"""

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, *, longest: int, buffer: int, penalty: float) -> Tensor:
    """FP64 [B], 0 or negative, to be added to the reward of a response of `lengths` tokens (int64 [B]).

    min(0, -penalty (length - (longest - buffer)) / buffer): 0 up to longest - buffer, -penalty at
    `longest`. buffer 0: no penalty. Raises ValueError unless 0 <= buffer <= longest, and for a response
    that is longer than the longest. Source: DAPO, equation 13.
    """
    if not 0 <= buffer <= longest:
        raise ValueError(f"a buffer of {buffer} tokens does not fit into {longest}")
    if bool((lengths > longest).any()):
        raise ValueError(f"a response of {int(lengths.max())} tokens; the longest has {longest}")
    if buffer == 0:
        return torch.zeros(len(lengths), dtype=torch.float64)
    beyond = (lengths.double() - (longest - buffer)).clamp(min=0)
    return torch.where(beyond > 0, -penalty * beyond / buffer, 0.0)


def overlong_filter(finish_reasons: list[str]) -> Tensor:
    """bool [B], false for a sample that was cut off ("length"): it is not trained on.

    Its reward stays in its group's statistics. Source: DAPO, section 3.4.
    """
    return torch.tensor([reason != "length" for reason in finish_reasons])
