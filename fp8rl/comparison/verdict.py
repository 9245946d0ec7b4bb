"""The verdict on an arm, by one stated rule, from the paired difference to the reference."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fp8rl.comparison.statistics import Estimate, t_quantile
from fp8rl.validation import LEVEL

MIN_SEEDS = 2
_MOST = 100


class Word(StrEnum):
    REFERENCE = "reference"
    EQUAL = "equal within the margin"
    BETTER = "better"
    WORSE = "worse"
    OPEN = "not enough data"


@dataclass(frozen=True)
class Verdict:
    """word: the verdict. why: in words, and what more data it would take where it is open."""

    word: Word
    why: str


JUDGED = (
    "Judged is the paired difference of sampled accuracy, arm minus reference, at the last evaluation, "
    "by its 95% interval."
)
ONE_OF_TWENTY = (
    "Each interval is at 95% by itself: of 20 arms that equal the reference exactly, about one has an "
    "interval without 0."
)


def fewest_prompts(margin: float) -> int:
    """So many prompts "equal" needs: if none of n differs, then a share of p that does is excluded at
    95% (two-sided) where (1 - p)^n <= 0.025, so for p = margin where n >= -ln(0.025) / margin."""
    return math.ceil(-math.log((1 - LEVEL) / 2) / margin)


def rule(margin: float) -> tuple[tuple[str, str], ...]:
    """(verdict, when it is given), as the page states it."""
    return (
        (
            Word.EQUAL.value,
            f"the whole interval lies within ±{100 * margin:g} points, the margin; and there are at "
            f"least {fewest_prompts(margin)} prompts, since fewer could not tell even if none differed",
        ),
        (Word.WORSE.value, "the whole interval is below 0, and not within the margin"),
        (Word.BETTER.value, "the whole interval is above 0, and not within the margin"),
        (
            Word.OPEN.value,
            f"everything else. Also with fewer than {MIN_SEEDS} seeds that both arms have, since one "
            "does not say how much seeds differ; and as long as a run of arm or reference has not come "
            "to its last iteration",
        ),
    )


def judge(low: float, high: float, margin: float) -> Word:
    """The rule for an interval [low, high] of complete runs of enough seeds."""
    if -margin <= low and high <= margin:
        return Word.EQUAL
    if high < 0:
        return Word.WORSE
    return Word.BETTER if low > 0 else Word.OPEN


def verdict(difference: Estimate | None, margin: float, unfinished: Sequence[str] = ()) -> Verdict:
    """difference: arm minus reference; None where no seed has both. unfinished: names of runs of either
    that did not come to their last iteration."""
    if difference is None:
        return Verdict(Word.OPEN, "no seed has an evaluation of both this arm and the reference")
    if unfinished:
        them = ", ".join(unfinished)
        return Verdict(
            Word.OPEN,
            f"did not come to their last iteration: {them}. Resume them, or leave them out (--runs)",
        )
    if difference.seeds < MIN_SEEDS:
        return Verdict(
            Word.OPEN,
            "one seed: the interval is over prompts only. Run two more seeds, to begin with",
        )
    word = judge(difference.low, difference.high, margin)
    if word is Word.EQUAL and difference.prompts < fewest_prompts(margin):
        few = f"{difference.prompts} prompts are too few; {fewest_prompts(margin)} are needed"
        return Verdict(Word.OPEN, f"{few} (task.val_prompts, or more seeds)")
    if word is Word.OPEN:
        return Verdict(word, more_data(difference, margin))
    if word is Word.EQUAL and not difference.low <= 0 <= difference.high:
        side = "below" if difference.high < 0 else "above"
        return Verdict(word, f"{side} 0, but by less than the margin")
    beyond = difference.high < -margin or difference.low > margin
    return Verdict(word, "by more than the margin" if beyond else "")


def more_data(difference: Estimate, margin: float) -> str:
    """About how many seeds would decide, in words.

    The interval must become narrower than what lies between the mean and the nearest edge that makes a
    verdict possible: |mean| for better or worse, margin - |mean| for equal. With S seeds it is about
    ± t sd / sqrt(S), sd that of the seeds' differences so far.
    """
    room = max(abs(difference.mean), margin - abs(difference.mean))
    sd = _deviation(list(difference.by_seed.values()))
    for seeds in range(difference.seeds + 1, _MOST + 1):
        if t_quantile(seeds) * sd / math.sqrt(seeds) <= room:
            return (
                f"about {seeds} seeds in all would decide, if they go on to differ as they do "
                f"(sd {100 * sd:.1f} points); more prompts help as far as that is chance of the prompts"
            )
    return (
        f"more than {_MOST} seeds would be needed as they differ now (sd {100 * sd:.1f} points): take "
        "more prompts, or a wider margin"
    )


def _deviation(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
