"""What validation answers say: accuracies with their intervals, pass@k. Without torch."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

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
    found = _accuracy("accuracy", counts)
    k = 2
    while k <= min(samples for samples, _ in counts):
        found[f"pass_at_{k}"] = pass_at_k(counts, k)
        k *= 2
    return found


def _accuracy(name: str, counts: Sequence[tuple[int, int]]) -> dict[str, float]:
    low, high = interval(counts)
    share = sum(good for _, good in counts) / sum(n for n, _ in counts)
    return {name: share, f"{name}_low": low, f"{name}_high": high}


def evaluation_metrics(columns: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """Of the columns kind, prompt_id, status and entry: `accuracy_metrics` of the sampled answers,
    greedy_accuracy with _low and _high of the greedy ones. Where the prompts come from several sources,
    the same of each, as <source>/<metric>.

    An answer is right where its status is ok.
    """
    rows = list(zip(*(columns[key] for key in ("kind", "prompt_id", "status")), strict=True))
    found = _of(rows)
    sources = [source_of(entry) for entry in columns["entry"]]
    if len(set(sources)) > 1:
        for source in dict.fromkeys(sources):
            part = [row for row, whose in zip(rows, sources, strict=True) if whose == source]
            found |= {f"{source}/{name}": value for name, value in _of(part).items()}
    return found


def _of(rows: Sequence[tuple[str, int, str]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind in ("sampled", "greedy"):
        answers = [(prompt, status == "ok") for which, prompt, status in rows if which == kind]
        if not answers:
            continue
        prompts, right = zip(*answers, strict=True)
        if kind == "sampled":
            found |= accuracy_metrics(prompts, right)
        else:
            found |= _accuracy("greedy_accuracy", by_prompt(prompts, right))
    return found


def source_of(entry: str) -> str:
    """Which of the task's sources a prompt is from, by its entry (JSON), as metrics can name it; empty
    where the task has no sources."""
    label = str(json.loads(entry).get("source", ""))
    # Letters of MLflow's names; a part of dots alone would be another place to it.
    return re.sub(r"[^A-Za-z0-9_.\- ]", "_", label).strip(".")
