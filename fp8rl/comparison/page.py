"""What the page of a comparison says: its sections, what decides first."""

import math
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime

from fp8rl import machine
from fp8rl.comparison import pictures
from fp8rl.comparison.blocks import Image, Page, Section, Table, Text
from fp8rl.comparison.compare import Arm, Comparison
from fp8rl.comparison.gather import RunData
from fp8rl.comparison.selection import values_of_recipe
from fp8rl.comparison.statistics import Estimate
from fp8rl.comparison.verdict import JUDGED, ONE_OF_TWENTY, rule
from fp8rl.report import ROWS

VERDICT, ACCURACY = "Verdict", "Accuracy"
NOTHING = "-"
EMULATED = (
    "Times and speeds are of a CPU, where FP8 products are emulated: they are costs of the emulation "
    "and say nothing of how fast FP8 is on a GPU."
)


def make_page(comparison: Comparison) -> Page:
    """Sections, what decides first."""
    sections = [
        *_verdicts(comparison),
        Section(ACCURACY, (_accuracy(comparison), Text((_HOW_ACCURACY,)))),
        Section("Curves", (pictures.curves(comparison),)),
        _figures(comparison),
        _shares(comparison),
        _guard(comparison),
        _runs(comparison),
        _recipes(comparison),
        Section("How this was computed", (Text((*_HOW, _made(comparison))),)),
    ]
    title = f"Comparison of the arms of experiment {comparison.experiment}"
    return Page(title, tuple(section for section in sections if section.blocks))


_HOW_ACCURACY = (
    "Accuracy: share of right answers, mean over seeds, with a 95% interval. The best evaluation is "
    "the highest of many, so it is too high by chance: compare arms by the last one."
)
_HOW = (
    "An interval is a hierarchical bootstrap: seeds are drawn with replacement, and prompts with "
    "replacement, the same draw for every seed that was asked a prompt. What comes from the seeds is "
    "widened to what Student's t gives for so few of them. With one seed the interval is over prompts "
    "only. Differences are paired: the same seed, the same prompt, the same iteration.",
    "Other figures are those of each run's summary (a median over its iterations, where it says "
    "nothing else), then the mean over runs, with the lowest and the highest in brackets.",
)


def _made(comparison: Comparison) -> str:
    runs, seeds = comparison.runs, sorted({run.seed for run in comparison.runs})
    return (
        f"{len(comparison.arms)} arms, {len(runs)} runs, seeds {', '.join(map(str, seeds))}; reference "
        f"{comparison.reference or 'none'}; margin {comparison.request.margin:g}. Made "
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by fp8rl at commit {machine.commit()}."
    )


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"


def share(one: Estimate | None) -> str:
    """An accuracy with its interval."""
    if one is None:
        return NOTHING
    return f"{one.mean:.1%} ({one.low:.1%} to {one.high:.1%})"


def points(one: Estimate | None) -> str:
    """A difference with its interval, in points."""
    if one is None:
        return NOTHING
    return f"{_points(one.mean)} ({_points(one.low)} to {_points(one.high)})"


def _verdicts(comparison: Comparison) -> list[Section]:
    notes = [*comparison.notes]
    notes += [f"{arm.name}: {note}" for arm in comparison.arms for note in arm.notes]
    blocks: list[Text | Table | Image] = []
    if comparison.reference is not None:
        rows = []
        for arm in comparison.arms:
            assert arm.verdict is not None
            sampled = arm.difference.sampled if arm.difference else None
            seeds = str(sampled.seeds) if sampled else NOTHING
            numbers = sorted(set(arm.difference.iterations.values())) if arm.difference else []
            at = ", ".join(map(str, numbers)) or NOTHING
            rows.append((arm.name, arm.verdict.word.value, points(sampled), seeds, at, arm.verdict.why))
        headings = (
            *("arm", "verdict", "difference of accuracy, points (95%)", "seeds in pairs"),
            *("at iteration", "why"),
        )
        blocks.append(Table(headings, tuple(rows)))
        blocks += pictures.forest(comparison)
        how = Table(("verdict", "when"), rule(comparison.request.margin), ONE_OF_TWENTY)
        blocks += [Text((JUDGED,)), how]
    sections = [Section(VERDICT, tuple(blocks))]
    if notes:
        sections.append(Section("To mind", (Text(tuple(notes)),)))
    return sections


def _accuracy(comparison: Comparison) -> Table:
    rows = []
    for arm in comparison.arms:
        greedy = points(arm.difference.greedy if arm.difference else None)
        seeds = str(arm.last.seeds) if arm.last else "0"
        prompts = str(arm.last.prompts) if arm.last else "0"
        cells = (share(arm.last), share(arm.best), share(arm.greedy), greedy)
        rows.append((arm.name, seeds, prompts, *cells))
    headings = (
        *("arm", "seeds", "prompts", "sampled, last evaluation", "sampled, best evaluation"),
        *("greedy, last evaluation", "greedy, difference in points"),
    )
    return Table(headings, tuple(rows))


# Said with intervals above.
_ABOVE = ("val_accuracy_after", "val_accuracy_best", "val_greedy_after")


def spread(values: Sequence[float], fmt: str) -> str:
    """Mean over runs, and the lowest and highest where there are several. What no run measured is a
    dash."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return NOTHING
    low, high = fmt.format(min(known)), fmt.format(max(known))
    text = fmt.format(statistics.fmean(known))
    return text if low == high else f"{text} ({low} to {high})"


def _figures(comparison: Comparison) -> Section:
    rows = [
        (
            label.strip(),
            *(spread([run.figures[key] for run in arm.runs], fmt) for arm in comparison.arms),
        )
        for label, key, fmt in ROWS
        if key not in _ABOVE and not all(math.isnan(run.figures[key]) for run in comparison.runs)
    ]
    if comparison.reference is not None:
        ratios = [NOTHING if arm.speed is None else f"{arm.speed:.2f}" for arm in comparison.arms]
        rows.append((f"tokens/s/GPU / that of {comparison.reference}, same machine", *ratios))
    headings = ("figure", *(arm.name for arm in comparison.arms))
    note = EMULATED if comparison.emulated else ""
    return Section("Figures", (Table(headings, tuple(rows), note),))


def _shares(comparison: Comparison) -> Section:
    shares = pictures.shares_by_arm(comparison)
    if not shares:
        return Section("Where the time goes", ())
    steps = list(dict.fromkeys(step for of_arm in shares.values() for step in of_arm))
    rows = tuple(
        (arm, *(f"{of_arm.get(step, 0.0):.1%}" for step in steps)) for arm, of_arm in shares.items()
    )
    note = EMULATED if comparison.emulated else ""
    table = Table(("arm", *steps), rows, note)
    return Section("Where the time goes", (table, pictures.shares(shares)))


def _guard(comparison: Comparison) -> Section:
    rows = [
        (run.arm, run.name, rule_name, str(count))
        for run in comparison.runs
        for rule_name, count in sorted(run.firings.items())
    ]
    if not rows:
        return Section("Guard", (Text(("No rule of the guard fired.",)),))
    return Section("Guard", (Table(("arm", "run", "rule that fired", "iterations"), tuple(rows)),))


def _runs(comparison: Comparison) -> Section:
    rows = tuple(_run(run) for run in comparison.runs)
    headings = (
        *("run", "arm", "seed", "state", "iteration", "accuracy, last", "at", "accuracy, best", "at"),
        *("machine", "why it is not running"),
    )
    return Section("Runs", (Table(headings, rows),))


def _run(run: RunData) -> tuple[str, ...]:
    last, best = run.last, run.best
    ran_on = f"{run.machine[1]}, {run.machine[2]} cores" if run.machine else "several"
    return (
        *(run.name, run.arm, str(run.seed), run.state.state, f"{run.done} of {run.recipe.iterations}"),
        spread([run.figures["val_accuracy_after"]], "{:.1%}"),
        str(last.iteration) if last else NOTHING,
        spread([run.figures["val_accuracy_best"]], "{:.1%}"),
        str(best.iteration) if best else NOTHING,
        ran_on,
        run.state.reason if run.state.is_over else "",
    )


def _recipes(comparison: Comparison) -> Section:
    """The recipe keys in which arms differ, and their values."""
    values = {arm.name: [values_of_recipe(run.recipe) for run in arm.runs] for arm in comparison.arms}
    keys = dict.fromkeys(key for of_arm in values.values() for one in of_arm for key in one)
    rows = []
    for key in keys:
        cells = [
            " / ".join(dict.fromkeys(one.get(key, "nothing") for one in of_arm))
            for of_arm in values.values()
        ]
        if len(set(cells)) > 1 or " / " in cells[0]:
            rows.append((key, *cells))
    if not rows:
        return Section("What differs", ())
    return Section("What differs", (Table(("recipe key", *values), tuple(rows)),))


def arm_figures(arm: Arm, key: str) -> float:
    """Mean over the arm's runs of a figure of their summaries; NaN where none has it."""
    known = [run.figures[key] for run in arm.runs if not math.isnan(run.figures[key])]
    return statistics.fmean(known) if known else math.nan
