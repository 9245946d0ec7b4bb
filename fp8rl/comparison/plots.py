"""The pictures of a comparison, as PNG: curves by arm, shares of the time, paired differences."""

import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8rl.comparison.gather import Series

# Okabe and Ito's colours, which colour-blind people can tell apart; black for the reference.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_STYLES = ("-", "--", ":")
_FEW = 15
_LONGEST = 32


@dataclass(frozen=True)
class Point:
    """The mean over runs at an iteration, with what the band shows."""

    iteration: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Panel:
    """lines: points by arm. limits: of the y axis."""

    title: str
    lines: Mapping[str, Sequence[Point]]
    limits: tuple[float, float] | None = None


_SPEED = "perf/tokens_per_sec_per_gpu"
METRICS = (
    ("val/accuracy", "Validation accuracy (sampled)", (0.0, 1.0)),
    ("train/reward_mean", "Mean reward of the samples", None),
    ("mismatch/token_mult_prob_error", "Mismatch (token_mult_prob_error)", None),
    ("rollout/entropy", "Entropy of what was sampled (nats)", None),
    ("rollout/response_length_mean", "Response length (tokens)", None),
    (_SPEED, "tokens/s/GPU", None),
)
# What the demo's and benchmarks' pictures show.
MAIN = tuple(name for name, _, _ in METRICS[:3])


def panels(
    runs: Mapping[str, Sequence[Series]], names: Iterable[str], *, emulated: bool = True
) -> list[Panel]:
    """A panel for each metric of `names` (see METRICS). runs: the series of each arm's runs. emulated:
    whether speeds are of a CPU. Mean over the runs that have the iteration; band from the lowest to the
    highest, of a metric with an interval of its own (<name>_low, <name>_high) of its ends."""
    known = {name: (title, limits) for name, title, limits in METRICS}
    found = []
    for name in names:
        title, limits = known[name]
        if name == _SPEED and emulated:
            title += ", FP8 emulated on a CPU"
        lines = {arm: _points(of, name) for arm, of in runs.items()}
        found.append(Panel(title, lines, limits))
    return found


def _points(runs: Sequence[Series], name: str) -> list[Point]:
    points = []
    for iteration in sorted({number for run in runs for number in run.get(name, {})}):
        there = [run for run in runs if iteration in run.get(name, {})]
        mean = statistics.fmean(run[name][iteration] for run in there)
        low, high = (
            [run.get(f"{name}_{end}", run[name]).get(iteration, run[name][iteration]) for run in there]
            for end in ("low", "high")
        )
        points.append(Point(iteration, mean, min(low), max(high)))
    return points


def label(name: str) -> str:
    """An arm's name in a picture: short, on one line, without what matplotlib takes for a command."""
    text = "".join(c if c.isprintable() else " " for c in name)
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    text = text.replace("$", r"\$")
    return f"\u200b{text}" if text.startswith("_") else text


_LEAST_SPAN = 1e-3


def plot_curves(panels: Sequence[Panel]) -> bytes:
    """A PNG of `panels`, three in a row."""
    rows = -(-len(panels) // 3)
    figure = _figure(13, 3.9 * rows)
    axes = figure.subplots(rows, min(3, len(panels)), squeeze=False).ravel()
    for axis, panel in zip(axes, panels, strict=False):
        for number, (arm, points) in enumerate(panel.lines.items()):
            _line(axis, points, label(arm), number)
        axis.set_title(panel.title, fontsize=10)
        axis.set_xlabel("iteration")
        axis.grid(alpha=0.3)
        axis.locator_params(axis="x", integer=True)
        if panel.limits:
            axis.set_ylim(*panel.limits)
        _at_least(axis, _LEAST_SPAN)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    axes[0].legend(fontsize=8)
    return _png(figure)


def _at_least(axis: Any, share: float) -> None:
    """Has the vertical axis span that share of what it shows: differences of last bits are no curve."""
    low, high = axis.get_ylim()
    spare = share * max(abs(low), abs(high)) - (high - low)
    if spare > 0:
        axis.set_ylim(low - spare / 2, high + spare / 2)


def _line(axis: Any, points: Sequence[Point], name: str, number: int) -> None:
    colour, style = _colour(number), _STYLES[number // len(_COLOURS) % len(_STYLES)]
    x = [point.iteration for point in points]
    marker = "o" if len(points) < _FEW else None
    axis.plot(
        x, [p.mean for p in points], label=name, color=colour, linestyle=style, marker=marker, ms=4
    )
    if any(point.low < point.high for point in points):
        low, high = [p.low for p in points], [p.high for p in points]
        axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def plot_shares(shares: Mapping[str, Mapping[str, float]]) -> bytes:
    """A PNG: for each arm a bar, the parts of an iteration's wall time by step."""
    figure = _figure(9, 1.3 + 0.45 * len(shares))
    axis = figure.subplots()
    steps = list(dict.fromkeys(step for of_arm in shares.values() for step in of_arm))
    for place, of_arm in enumerate(shares.values()):
        left = 0.0
        for number, step in enumerate(steps):
            width = 100 * of_arm.get(step, 0.0)
            colour = "#BBBBBB" if step == "other" else _colour(number + 1)
            axis.barh(place, width, left=left, color=colour, label=step if place == 0 else None)
            if width >= 6:
                axis.text(left + width / 2, place, f"{width:.0f}", ha="center", va="center", fontsize=8)
            left += width
    axis.set_yticks(range(len(shares)), [label(arm) for arm in shares])
    axis.set_ylim(len(shares) - 0.5, -0.5)
    axis.set_xlim(0, 100)
    axis.set_xlabel("% of an iteration's wall time")
    axis.legend(
        fontsize=8, ncols=len(steps), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False
    )
    return _png(figure)


@dataclass(frozen=True)
class Whisker:
    """A row of the forest plot, in points of accuracy. number: of the arm, which has that colour."""

    name: str
    number: int
    mean: float
    low: float
    high: float
    by_seed: Sequence[float]


def plot_forest(whiskers: Sequence[Whisker], margin: float, reference: str) -> bytes:
    """A PNG: each arm's paired difference with its 95% interval, and the difference of each seed. The
    band is the margin. All in points."""
    figure = _figure(9, 1.6 + 0.5 * len(whiskers))
    axis = figure.subplots()
    axis.axvspan(-margin, margin, color="#56B4E9", alpha=0.2, label="margin", linewidth=0)
    axis.axvline(0, color="#666666", linewidth=1)
    for place, one in enumerate(whiskers):
        colour = _colour(one.number)
        axis.plot([one.low, one.high], [place, place], color=colour, linewidth=2)
        axis.plot(one.mean, place, "s", color=colour)
        axis.plot(one.by_seed, [place + 0.25] * len(one.by_seed), "|", color=colour, ms=8)
    axis.set_yticks(range(len(whiskers)), [label(one.name) for one in whiskers])
    axis.set_ylim(len(whiskers) - 0.4, -0.6)
    axis.set_xlabel(f"accuracy minus that of {label(reference)}, points (below: each seed)")
    axis.grid(alpha=0.3, axis="x")
    axis.legend(fontsize=8)
    return _png(figure)


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def _png(figure: Any) -> bytes:
    figure.tight_layout()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    return image.getvalue()
