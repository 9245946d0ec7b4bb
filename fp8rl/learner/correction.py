"""Rollout correction: weights for samples that another precision has drawn.

g: rollout log-prob, p: learner log-prob under the weights that drew the sample, both of the sampled
token. The weight w = exp(p - g) re-weights the loss to the learner's own distribution.
"""

import torch
from torch import Tensor

from fp8rl.recipe.schema import Correction, CorrectionMode

LOG_RATIO_CLAMP = 20.0


def importance_weights(p: Tensor, g: Tensor, correction: Correction) -> Tensor:
    """Detached weights [B, T] for log-probs p, g [B, T]; ones where correction is off.

    token: min(exp(clamp(p - g, -20, 20)), truncate). Truncated importance sampling: FlashRL, and
    FP8-RL (arXiv 2601.18150) with truncate = 2.
    """
    if correction.mode is CorrectionMode.OFF:
        return torch.ones_like(p)
    ratio = (p - g).detach().clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    return ratio.clamp(max=correction.truncate)
