"""The samples of an iteration on which rollout and learner agree least: what to look at first."""

from typing import Any

import torch
from torch import Tensor

from fp8rl.learner.batch import Batch
from fp8rl.mismatch import sequence_errors

KEPT = 8


def worst_samples(
    rollouts: dict[str, list[Any]], rewards: dict[str, list[Any]], batch: Batch, p: Tensor
) -> dict[str, list[Any]]:
    """Columns, the worst sample first, at most KEPT rows: prompt_id, sample, weight_version, reward,
    finish_reason, error (mean exp|g - p|; NaN where a log-prob is not finite, which comes first),
    text, tokens, and both traces of log-probs over them, rollout and learner (nats).

    rollouts, rewards: columns of the iteration's tables, row by row those of `batch`. p: [B, T].
    """
    errors = sequence_errors(batch.g, p, batch.mask)
    order = torch.where(torch.isnan(errors), torch.inf, errors).argsort(descending=True, stable=True)
    rows = order[:KEPT].tolist()
    table: dict[str, list[Any]] = {
        name: [rollouts[name][i] for i in rows]
        for name in ("prompt_id", "sample", "weight_version", "finish_reason", "text", "tokens")
    }
    table["reward"] = [rewards["reward"][i] for i in rows]
    table["error"] = errors[rows].tolist()
    table["rollout"] = [rollouts["logprobs"][i] for i in rows]
    table["learner"] = [p[i][batch.mask[i]].double().tolist() for i in rows]
    return table
