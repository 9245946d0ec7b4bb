"""The table of an iteration's samples: made in chunks, joined, and summed up."""

import math
from typing import Any

from fp8rl.rollout.pressure import Pressure, combine

Columns = dict[str, list[Any]]


def join(chunks: list[Columns]) -> Columns:
    """The chunks' columns one after the other."""
    return {name: [value for chunk in chunks for value in chunk[name]] for name in chunks[0]}


def rollout_metrics(columns: Columns, seconds: float, pressures: list[Pressure]) -> dict[str, float]:
    """Metrics of a whole rollout. seconds: generation time of all its chunks; pressures: of each."""
    lengths = [len(tokens) for tokens in columns["tokens"]]
    # What is not finite is counted by the learner's rule for it (correction.invalid).
    logprobs = [value for row in columns["logprobs"] for value in row if math.isfinite(value)]
    cut_off = sum(reason == "length" for reason in columns["finish_reason"])
    return {
        "rollout/response_length_mean": sum(lengths) / len(lengths),
        "rollout/truncated": cut_off / len(lengths),
        # The mean surprisal of what was sampled: an unbiased estimate of the policy's entropy.
        "rollout/entropy": -sum(logprobs) / len(logprobs),
        "perf/rollout_tokens_per_sec": sum(lengths) / seconds,
        **combine(pressures).metrics(),
    }
