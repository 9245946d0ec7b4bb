"""The pictures of a comparison's page: what is plotted of it."""

import statistics

from fp8rl.comparison.blocks import Image
from fp8rl.comparison.compare import Comparison
from fp8rl.comparison.plots import (
    METRICS,
    Whisker,
    panels,
    plot_curves,
    plot_forest,
    plot_shares,
)


def curves(comparison: Comparison) -> Image:
    """All metrics by arm."""
    series = {arm.name: [run.series for run in arm.runs] for arm in comparison.arms}
    png = plot_curves(panels(series, [name for name, _, _ in METRICS], emulated=comparison.emulated))
    note = (
        "Mean over the runs that got there. Bands: from the lowest to the highest of the seeds; of the "
        "accuracy from the lowest to the highest end of their 95% intervals over prompts."
    )
    return Image(png, "Curves by arm: " + ", ".join(title for _, title, _ in METRICS), note)


def forest(comparison: Comparison) -> list[Image]:
    """The paired differences; none without one."""
    whiskers = [
        Whisker(
            arm.name,
            number,
            100 * one.mean,
            100 * one.low,
            100 * one.high,
            [100 * value for value in one.by_seed.values()],
        )
        for number, arm in enumerate(comparison.arms)
        if arm.difference and (one := arm.difference.sampled)
    ]
    if not whiskers:
        return []
    png = plot_forest(whiskers, 100 * comparison.request.margin, comparison.reference or "")
    return [Image(png, "Paired difference of each arm to the reference, with its 95% interval")]


def shares_by_arm(comparison: Comparison) -> dict[str, dict[str, float]]:
    """{arm: {step: share of the wall time}}, mean over the runs that have trained."""
    found = {}
    for arm in comparison.arms:
        trained = [run.shares for run in arm.runs if run.shares]
        if trained:
            found[arm.name] = {
                step: statistics.fmean(one[step] for one in trained) for step in trained[0]
            }
    return found


def shares(by_arm: dict[str, dict[str, float]]) -> Image:
    return Image(plot_shares(by_arm), "Share of each step in the wall time of an iteration, by arm")
