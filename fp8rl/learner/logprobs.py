"""Log-probabilities of the sampled tokens, of the distribution that was sampled from."""

from collections.abc import Callable

import torch
from torch import Tensor

from fp8rl.learner.batch import Batch

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
    logp = _log_softmax(logits, temperature)
    chosen = _chosen(logp, tokens)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(logp.exp() * logp).sum(-1)
    return chosen, entropy


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits[:, :-1].float() / temperature, dim=-1)


def _chosen(logp: Tensor, tokens: Tensor) -> Tensor:
    return logp.gather(-1, tokens[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def batch_logprobs(
    model: Callable[[Tensor], Tensor], batch: Batch, temperature: float, micro_batch: int
) -> Tensor:
    """FP32 [B, S-1] log-probs of `batch` under `model`, which makes logits [b, s, V] of tokens [b, s];
    0 outside the response. micro_batch: sequences at a time."""
    result = torch.zeros_like(batch.g)
    start = 0
    for part in batch.split(micro_batch):
        # Without the entropy, which takes longer than the log-probs.
        logp = _chosen(_log_softmax(model(part.tokens), temperature), part.tokens)
        rows = slice(start, start + len(part.lengths))
        result[rows, : logp.shape[1]] = torch.where(part.mask, logp, 0.0)
        start = rows.stop
    return result
