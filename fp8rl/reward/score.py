"""Verifiers: a completion's reward and what became of it."""

import json
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from fp8rl.data.tasks import make_generator
from fp8rl.recipe.schema import Task
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
    scorer = make_generator(task, seed=0, size=1)
    return [
        _score(scorer, extract(task.extract, text), json.loads(entry))
        for text, entry in zip(completions, entries, strict=True)
    ]


def _score(scorer: Any, answer: str | None, entry: dict[str, Any]) -> Verdict:
    if answer is None:
        return Verdict(0.0, Status.UNPARSABLE, "nothing to score in the completion")
    try:
        reward = float(scorer.score_answer(answer, entry))
    except Exception as error:
        return Verdict(0.0, Status.ERROR, f"{type(error).__name__}: {error}")
    return Verdict(reward, Status.OK if reward >= 1.0 else Status.WRONG)


def count_statuses(statuses: list[str]) -> dict[str, int]:
    """How many completions ended in each status, the empty ones included."""
    counts = Counter(statuses)
    return {status.value: counts.get(status.value, 0) for status in Status}
