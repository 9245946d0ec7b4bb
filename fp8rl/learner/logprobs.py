"""Log-probabilities of the sampled tokens, of the distribution that was sampled from."""

import torch
from torch import Tensor

LOG_RATIO_CLAMP = 20.0


def clamped_log_ratio(a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: a - b of log-probs, clamped to +-20 so that no token makes a sum infinite.

    0 outside the mask, forward and backward, whatever a and b hold there.
    """
    return torch.where(mask, a - b, 0.0).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """(logp, entropy) FP32 [B, S-1] of tokens 1..S-1, each given those before it.

    logits: [B, S, V] for `tokens` int64 [B, S]. Position j scores tokens[:, j+1] with logits[:, j].
    The temperature divides the logits, in FP32, before the softmax. entropy is that of the whole
    distribution at the position, in nats; it carries a gradient where it is asked for.
    """
    scaled = logits[:, :-1].float() / temperature
    logp = torch.log_softmax(scaled, dim=-1)
    chosen = logp.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(logp.exp() * logp).sum(-1)
    return chosen, entropy
