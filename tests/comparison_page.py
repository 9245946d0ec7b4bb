"""Every number of a comparison's page, held against the raw run folders."""

from collections.abc import Iterable

import numpy as np

from tests.comparison_oracle import PageReader, RawRun, accuracy, difference

MARGIN = 0.02
# Of fewer prompts none may be called equal: none that differs of n says little where n is small.
FEWEST = 185

# {label: (metric, format)}: the median over the iterations but the first, spread over the runs.
MEDIANS = {
    "mismatch (token_mult_prob_error)": ("mismatch/token_mult_prob_error", "{:.4f}"),
    "KL rollout || learner (k3)": ("mismatch/kl_k3", "{:.2e}"),
    "effective sample size": ("mismatch/ess", "{:.4f}"),
    "entropy of what was sampled (nats)": ("rollout/entropy", "{:.3f}"),
    "response length (tokens)": ("rollout/response_length_mean", "{:.1f}"),
    "tokens/s/GPU": ("perf/tokens_per_sec_per_gpu", "{:,.0f}"),
    "rollout tokens/s": ("perf/rollout_tokens_per_sec", "{:,.0f}"),
    "learner tokens/s": ("perf/learner_tokens_per_sec", "{:,.0f}"),
    "time of an iteration (s)": ("timing/iteration_s", "{:.2f}"),
}
# {label: (metric, over all iterations, format)}
TOTALS = {
    "mismatch, worst iteration": ("mismatch/token_mult_prob_error", max, "{:.4f}"),
    "effective sample size, worst iteration": ("mismatch/ess", min, "{:.4f}"),
    "KV cache, peak use": ("kv/peak_use", max, "{:.0%}"),
    "KV cache, preemptions": ("kv/preemptions", sum, "{:.0f}"),
    "iterations in which the guard fired": (
        "guard/fired",
        lambda values: sum(value > 0 for value in values),
        "{:.0f}",
    ),
}
BEFORE = {"sampled accuracy before": "val/accuracy", "greedy accuracy before": "val/greedy_accuracy"}


def require_right(page: PageReader, raw: dict[str, list[RawRun]]) -> None:
    """Asserts that each number of the page is that of the runs of `raw`, by arm; the first arm is the
    reference. All runs are of the same iterations, and finished."""
    _require_accuracy(page, raw)
    _require_figures(page, raw)
    for row in page.tables["Runs"][0][1:]:
        run = next(r for r in raw[row[1]] if r.seed == int(row[2]))
        assert row[3:5] == ["finished", f"{run.iterations} of {run.iterations}"]
        assert row[5:9] == [
            *(f"{run.accuracy[run.last]:.1%}", str(run.last)),
            *(f"{run.accuracy[run.best]:.1%}", str(run.best)),
        ]
    assert len(page.tables["Runs"][0][1:]) == sum(map(len, raw.values()))
    heads, *rows = page.tables["What differs"][0]
    assert heads[1:] == list(raw)
    differs = {row[0]: row[1:] for row in rows}
    assert differs["precision.learner"] == ["fp8" if "fp8-e2e" in arm else "bf16" for arm in raw]
    assert all(key.startswith("precision.") for key in differs)


def _require_accuracy(page: PageReader, raw: dict[str, list[RawRun]]) -> None:
    share = "{:.1%} ({:.1%} to {:.1%})".format
    reference = next(iter(raw.values()))
    rows = zip(page.tables["Accuracy"][0][1:], page.tables["Verdict"][0][1:], strict=True)
    for (row, judged), (arm, runs) in zip(rows, raw.items(), strict=True):
        prompts = len({q for run in runs for q in run.answers[run.last]["sampled"]})
        assert row[:3] == [arm, str(len(runs)), str(prompts)]
        assert row[3] == share(*accuracy(runs))
        assert row[4] == share(*accuracy(runs, best=True))
        assert row[5] == share(*accuracy(runs, kind="greedy"))
        assert judged[0] == arm
        if runs is reference:
            assert judged[1] == "reference"
            continue
        found = difference(runs, reference)
        assert row[6] == _points(difference(runs, reference, "greedy"))
        assert judged[1:3] == [_word(*found, prompts), _points(found)], arm


def _word(mean: float, low: float, high: float, prompts: int) -> str:
    if low >= -MARGIN and high <= MARGIN:
        return "equal within the margin" if prompts >= FEWEST else "not enough data"
    if high < 0:
        return "worse"
    return "better" if low > 0 else "not enough data"


def _points(values: Iterable[float]) -> str:
    return "{} ({} to {})".format(*(f"{100 * value:+.1f}" for value in values))


def _require_figures(page: PageReader, raw: dict[str, list[RawRun]]) -> None:
    figures = {row[0]: row[1:] for row in page.tables["Figures"][0][1:]}
    for place, runs in enumerate(raw.values()):
        for label, (key, fmt) in MEDIANS.items():
            assert figures[label][place] == _spread([run.median(key) for run in runs], fmt), label
        for label, (key, reduce, fmt) in TOTALS.items():
            assert figures[label][place] == _spread([reduce(run.over(key)) for run in runs], fmt), label
        for label, key in BEFORE.items():
            assert figures[label][place] == _spread([run.metrics[0][key] for run in runs], "{:.1%}")
    speeds = [np.mean([run.median("perf/tokens_per_sec_per_gpu") for run in of]) for of in raw.values()]
    ratio = f"tokens/s/GPU / that of {next(iter(raw))}, same machine"
    assert figures[ratio] == [f"{speed / speeds[0]:.2f}" for speed in speeds]
    assert set(figures) == {*MEDIANS, *TOTALS, *BEFORE, ratio}
    assert "FP8 products are emulated" in page.text

    heads, *shares = page.tables["Where the time goes"][0]
    for row, (arm, runs) in zip(shares, raw.items(), strict=True):
        wanted = [np.mean([run.shares()[step] for run in runs]) for step in heads[1:]]
        assert row == [arm, *(f"{value:.1%}" for value in wanted)]
        assert 0.98 < sum(wanted) < 1.02


def _spread(values: list[float], fmt: str) -> str:
    low, high = fmt.format(min(values)), fmt.format(max(values))
    mean = fmt.format(np.mean(values))
    return mean if low == high else f"{mean} ({low} to {high})"
