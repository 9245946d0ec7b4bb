"""What validation samples say: accuracy with its interval, pass@k. Without torch."""

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95


def by_prompt(prompts: Sequence[int], right: Sequence[bool]) -> list[tuple[int, int]]:
    """(samples, right ones) of each prompt, in the order in which prompts first appear."""
    counts: dict[int, tuple[int, int]] = {}
    for prompt, is_right in zip(prompts, right, strict=True):
        samples, good = counts.get(prompt, (0, 0))
        counts[prompt] = (samples + 1, good + is_right)
    return list(counts.values())


def pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float:
    """Mean over prompts of the chance that one of k samples is right: 1 - C(n - c, k) / C(n, k) for c
    right ones of n.

    Unbiased; accuracy is pass@1. Raises ValueError where a prompt has fewer than k samples.
    Source: Chen et al., arXiv 2107.03374.
    """
    if any(samples < k for samples, _ in counts):
        raise ValueError(f"pass@{k} needs {k} samples of every prompt")
    missed = [math.comb(n - c, k) / math.comb(n, k) for n, c in counts]
    return 1 - sum(missed) / len(missed)


def interval(counts: Sequence[tuple[int, int]], seed: int = 0) -> tuple[float, float]:
    """95% interval of the accuracy, by bootstrap over prompts: those of a prompt stay together, since
    they are alike. The same counts and seed give the same interval."""
    shares = np.array([good / samples for samples, good in counts])
    rows = np.random.default_rng(seed).integers(0, len(shares), (RESAMPLES, len(shares)))
    edges = (1 - LEVEL) / 2, (1 + LEVEL) / 2
    low, high = np.quantile(shares[rows].mean(1), edges)
    return float(low), float(high)


def accuracy_metrics(prompts: Sequence[int], right: Sequence[bool]) -> dict[str, float]:
    """Of the sampled answers: accuracy (which is mean@k), accuracy_low and accuracy_high (95%), and
    pass_at_k for every k that is a power of two up to the samples of a prompt."""
    counts = by_prompt(prompts, right)
    low, high = interval(counts)
    found = {
        "accuracy": sum(good for _, good in counts) / sum(n for n, _ in counts),
        "accuracy_low": low,
        "accuracy_high": high,
    }
    k = 2
    while k <= min(samples for samples, _ in counts):
        found[f"pass_at_{k}"] = pass_at_k(counts, k)
        k *= 2
    return found
