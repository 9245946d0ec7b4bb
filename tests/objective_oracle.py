"""An independent oracle of the objective: the formulas of docs/objective.md a second time, in NumPy
float64, sequence by sequence and token by token. It shares no code with fp8rl.

Log-probs come as [B, T] arrays with a bool mask; a sequence is the list of its masked positions.
"""

import math

import numpy as np


def advantages(kind: str, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    result = np.zeros(len(rewards))
    for i, reward in enumerate(rewards):
        group = rewards[groups == groups[i]]
        if len(set(group.tolist())) == 1:
            continue
        if kind == "rloo":
            result[i] = reward - (group.sum() - reward) / (len(group) - 1)
            continue
        result[i] = reward - group.mean()
        if kind == "grpo":
            result[i] /= np.std(group, ddof=1) + 1e-6
    if kind == "reinforce_plus_plus":
        result = (result - result.mean()) / (np.std(result, ddof=1) + 1e-6)
    return result


def clamp(x: float) -> float:
    return min(max(x, -20.0), 20.0)


def weight(log_ratios: list[float], t: int, mode: str) -> float:
    """Raw weight of token t of a sequence, from its clamped log-ratios."""
    logs = [clamp(x) for x in log_ratios]
    if mode == "off":
        return 1.0
    if mode == "token":
        return math.exp(logs[t])
    total = sum(logs) if mode == "sequence" else sum(logs) / len(logs)
    return math.exp(clamp(total))


def bound(w: float, how: str, low: float | None, high: float) -> float:
    if how == "icepop":
        return w if low <= w <= high else 0.0
    w = min(w, high)
    return w if low is None else max(w, low)


def kept(log_ratios: list[float], t: int, by: str, level: str, low: float | None, high: float) -> bool:
    """Whether token t of a sequence is kept by a rule."""
    logs = [clamp(x) for x in log_ratios]
    logs = [logs[t]] if level == "token" else logs
    if by == "k1":
        total = sum(logs) if level == "sequence_sum" else sum(logs) / len(logs)
        ratio = math.exp(total)
        return (1 / high if low is None else low) <= ratio <= high
    values = [x * x / 2 if by == "k2" else math.exp(x) - 1 - x for x in logs]
    if level == "sequence_max":
        return max(values) <= high
    total = sum(values)
    return (total / len(values) if level == "sequence_mean" else total) <= high


def surrogate(
    kind: str,
    c: np.ndarray,
    p: np.ndarray,
    a: float,
    *,
    low: float,
    high: float,
    dual: float | None = None,
    fixed: np.ndarray | None = None,
) -> np.ndarray:
    """Of the tokens of one sequence. fixed: the log-probs that a stop-gradient holds on to."""
    fixed = c if fixed is None else fixed
    if kind == "reinforce":
        return a * c
    if kind == "cispo":
        return np.clip(np.exp(fixed - p), 1 - low, 1 + high) * a * c
    ratio = np.exp(c - p) if kind == "clipped" else np.full_like(c, math.exp(np.mean(c - p)))
    value = np.minimum(ratio * a, np.clip(ratio, 1 - low, 1 + high) * a)
    return np.maximum(value, dual * a) if dual is not None and a < 0 else value


def aggregate(sequences: list[np.ndarray], how: str, length: int = 1) -> float:
    """sequences: values of the tokens of each that are trained on; empty ones do not count."""
    full = [s for s in sequences if len(s)]
    if not full:
        return 0.0
    total = float(sum(s.sum() for s in full))
    return {
        "token_mean": total / sum(len(s) for s in full),
        "token_sum": total,
        "sequence_mean_token_mean": float(np.mean([s.mean() for s in full])),
        "sequence_mean_token_sum": total / len(full),
        "constant_length": total / len(full) / length,
    }[how]


def loss(kind, c, p, a, w, mask, *, how, length=1, fixed=None, **clips) -> float:
    """The whole objective of arrays [B, T] and advantages [B]."""
    fixed = c if fixed is None else fixed
    rows = []
    for b in range(len(c)):
        m = mask[b]
        values = np.zeros(0)
        if m.any():
            values = w[b][m] * surrogate(kind, c[b][m], p[b][m], a[b], fixed=fixed[b][m], **clips)
        rows.append(values)
    return -aggregate(rows, how, length)


def kl_estimate(by: str, c: float, ref: float) -> float:
    """Of KL(policy || reference), of one token that the policy drew."""
    x = clamp(ref - c)
    return {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[by]


def kl_term(by, c, ref, w, mask, *, how, length=1) -> float:
    """The aggregated KL of arrays [B, T], not yet times beta; w: importance weights."""
    rows = [
        np.array([w[b, t] * kl_estimate(by, c[b, t], ref[b, t]) for t in np.flatnonzero(mask[b])])
        for b in range(len(c))
    ]
    return aggregate(rows, how, length)


def kl_reward(by, p, ref, mask, beta) -> np.ndarray:
    """What the KL adds to each sample's reward."""
    sums = [
        sum(kl_estimate(by, p[b, t], ref[b, t]) for t in np.flatnonzero(mask[b])) for b in range(len(p))
    ]
    return -beta * np.array(sums)


def kl_gradient(logits: np.ndarray, ref: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Of KL(softmax(logits) || exp(ref)) over a whole vocabulary, by finite differences."""

    def divergence(x: np.ndarray) -> float:
        p = np.exp(x) / np.exp(x).sum()
        return float((p * (np.log(p) - ref)).sum())

    eyes = np.eye(len(logits)) * step
    return np.array([(divergence(logits + e) - divergence(logits - e)) / (2 * step) for e in eyes])
