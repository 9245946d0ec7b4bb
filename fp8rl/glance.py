"""A run at a glance: its last iterations as rows, and sparklines of what matters first."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from fp8rl.journal import StepRecord
from fp8rl.report import STEPS

ACCURACY, REWARD = "val/accuracy", "train/reward_mean"
MISMATCH = "mismatch/token_mult_prob_error"
# (heading, metric, format)
_COLUMNS = (
    ("accuracy", ACCURACY, "{:.1%}"),
    ("reward", REWARD, "{:.3f}"),
    ("mismatch", MISMATCH, "{:.4f}"),
    ("tokens/s", "perf/tokens_per_sec_per_gpu", "{:,.0f}"),
    ("KV peak", "kv/peak_use", "{:.0%}"),
    ("preempted", "kv/preemptions", "{:.0f}"),
    *((f"{step} s", f"timing/{step}_s", "{:.2f}") for step in STEPS),
)
HEADINGS = ("iteration", *(heading for heading, _, _ in _COLUMNS))
_BARS = "▁▂▃▄▅▆▇█"


def cells(number: int, metrics: dict[str, float]) -> list[str]:
    """A row under HEADINGS; empty cells where the iteration has no such metric."""
    values = [(metrics.get(name, math.nan), text) for _, name, text in _COLUMNS]
    return [str(number), *("" if math.isnan(value) else text.format(value) for value, text in values)]


def line(number: int, metrics: dict[str, float]) -> str:
    """The row as text, each cell after its heading."""
    row = zip(HEADINGS, cells(number, metrics), strict=True)
    return "  ".join(f"{heading} {cell}" for heading, cell in row if cell)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """`values` as bars from their least to their greatest; more than `width` of them as means of parts.

    A gap stands for what is not finite.
    """
    if len(values) > width:
        edges = [len(values) * i // width for i in range(width + 1)]
        parts = (values[a:b] for a, b in pairwise(edges))
        values = [sum(part) / len(part) for part in parts]
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    step = (high - low) / (len(_BARS) - 1) or 1.0
    return "".join(
        _BARS[round((value - low) / step)] if math.isfinite(value) else " " for value in values
    )


def trends(records: Iterable[StepRecord]) -> list[tuple[str, str, str]]:
    """(what, sparkline, "first → last") of accuracy, reward and mismatch, as far as they are there."""
    found = []
    metrics = [record.metrics for record in records]
    for heading, name, text in _COLUMNS[:3]:
        values = [one[name] for one in metrics if name in one]
        if values:
            ends = f"{text.format(values[0])} → {text.format(values[-1])}"
            found.append((heading, sparkline(values), ends))
    return found


def markdown(records: Sequence[StepRecord], total: int, links: dict[str, str], kept: int = 8) -> str:
    """The glance as Markdown. total: iterations of the recipe. links: {text: URL}. kept: last rows."""
    done = records[-1].iteration if records else 0
    lines = [f"**Iteration {done} of {total}**", ""]
    lines += [f"- {what} `{bars}` {ends}" for what, bars, ends in trends(records)]
    lines += [f"- [{text}]({url})" for text, url in links.items()]
    rows = [HEADINGS, *(cells(r.iteration, r.metrics) for r in records[-kept:])]
    times = len(HEADINGS) - len(STEPS)  # in a table of their own: one of all is wider than the page
    lines += ["", *_table(row[:times] for row in rows)]
    lines += ["", *_table((row[0], *row[times:]) for row in rows)]
    return "\n".join(lines)


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; the first row is the headings."""
    headings, *others = [f"| {' | '.join(row)} |" for row in rows]
    return [headings, "|" + " --- |" * (headings.count("|") - 1), *others]
