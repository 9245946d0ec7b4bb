"""Verifiers: a completion's reward and what became of it."""

import json
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fp8rl.data.tasks import make_generator
from fp8rl.recipe.data import train_sources, val_sources
from fp8rl.recipe.schema import Extract, Task
from fp8rl.reward.extract import extract


class Status(StrEnum):
    """ok: full score. wrong: less. unparsable: nothing to score. error: the scorer failed."""

    OK = "ok"
    WRONG = "wrong"
    UNPARSABLE = "unparsable"
    ERROR = "error"


@dataclass(frozen=True)
class Verdict:
    reward: float
    status: Status
    detail: str = ""


def score_all(task: Task, completions: list[str], entries: list[str]) -> list[Verdict]:
    """Verdicts for `completions`, each against its task item (`entries`, JSON).

    What of a completion is scored is for task.extract to say.

    A scorer that raises gives status `error` with reward 0 and the reason, and is counted by the
    caller; it never stops the batch.
    """
    scorers = _scorers(task)
    return [
        _score(scorers, extract(task.extract, text), json.loads(entry))
        for text, entry in zip(completions, entries, strict=True)
    ]


def _scorers(task: Task) -> dict[str | None, Any]:
    """What scores the entries of each source, by their "source"."""
    return {
        one.label: make_generator(one.source, seed=0, size=1, key=one.key)
        if one.source.is_generator
        else _Exact(task.extract)
        for one in [*train_sources(task), *val_sources(task)]
    }


@dataclass(frozen=True)
class _Exact:
    """For entries of files: 1 where the same is extracted from the reference answer."""

    how: Extract

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return float(answer.strip() == (extract(self.how, entry["answer"]) or "").strip())


def _score(scorers: dict[str | None, Any], answer: str | None, entry: dict[str, Any]) -> Verdict:
    if answer is None:
        return Verdict(0.0, Status.UNPARSABLE, "nothing to score in the completion")
    try:
        reward = float(scorers[entry.get("source")].score_answer(answer, entry))
    except Exception as error:
        return Verdict(0.0, Status.ERROR, f"{type(error).__name__}: {error}")
    return Verdict(reward, Status.OK if reward >= 1.0 else Status.WRONG)


def count_statuses(statuses: list[str]) -> dict[str, int]:
    """How many completions ended in each status, the empty ones included."""
    counts = Counter(statuses)
    return {status.value: counts.get(status.value, 0) for status in Status}
