"""The rewards of a task: each completion's verdicts, and their weighted sum."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8rl.recipe.reward import (
    AnyVerifier,
    ExactVerifier,
    LengthVerifier,
    MathVerifier,
    NumericVerifier,
    TaskVerifier,
)
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Task
from fp8rl.reward.extract import extract
from fp8rl.reward.functions import FunctionSource, function_sources
from fp8rl.reward.isolation import settled
from fp8rl.reward.own import OwnScorers
from fp8rl.reward.verdict import Status, Verdict
from fp8rl.reward.verifiers import as_reward, exact, length, numeric
from fp8rl.reward.workers import Worker, WorkerStartError, shared_worker

# These are right about the reference answer itself, or can be used for nothing.
_KNOW_THE_ANSWER = (ExactVerifier, NumericVerifier, MathVerifier)


@dataclass(frozen=True)
class Score(Verdict):
    """reward: the weighted sum. status and detail: of the first verifier of task.rewards, which says
    whether the completion is right. parts: verdicts in the order of task.rewards, not yet weighted."""

    parts: tuple[Verdict, ...] = ()


class _Scorer:
    def __init__(self, task: Task, worker: Worker | None) -> None:
        """task: of `settled`. worker: for the rewards that run in one; None where no reward does."""
        self._task, self._worker = task, worker
        inside = any(isinstance(v, TaskVerifier) and not v.isolation for v in task.rewards)
        self._own = OwnScorers(task) if inside else None

    def score(self, completion: str, entry: str) -> Score:
        text, item = extract(self._task.extract, completion), json.loads(entry)
        given = {
            "completion": completion,
            "text": text,
            "question": str(item.get("question", "")),
            "answer": str(item["answer"]) if "answer" in item else None,
            "entry": entry,
        }
        parts = tuple(
            self._verdict(index, verifier, given, item)
            for index, verifier in enumerate(self._task.rewards)
        )
        weights = [verifier.weight for verifier in self._task.rewards]
        total = sum(weight * part.reward for weight, part in zip(weights, parts, strict=True))
        return Score(total, parts[0].status, parts[0].detail, parts)

    def _verdict(
        self, index: int, verifier: AnyVerifier, given: dict[str, Any], item: dict[str, Any]
    ) -> Verdict:
        text, answer = given["text"], given["answer"]
        if text is None and verifier.sees_extract:
            return Verdict.without_score(Status.UNPARSABLE, "nothing to score in the completion")
        if answer is None and not isinstance(verifier, TaskVerifier | LengthVerifier):
            return Verdict.without_score(Status.ERROR, "the prompt has no reference answer")
        if verifier.isolation:
            assert self._worker is not None
            return self._worker.score(index, given)
        try:
            if isinstance(verifier, ExactVerifier):
                return exact(text, answer)
            if isinstance(verifier, NumericVerifier):
                return numeric(text, answer, absolute=verifier.absolute, relative=verifier.relative)
            if isinstance(verifier, LengthVerifier):
                completion = given["completion"]
                return length(
                    completion, max_chars=verifier.max_chars, buffer_chars=verifier.buffer_chars
                )
            assert self._own is not None
            return as_reward(self._own.score_answer(text, item))
        except Exception as error:
            return Verdict.of_failure(error)


def score_all(
    task: Task,
    completions: list[str],
    entries: list[str],
    functions: Mapping[str, FunctionSource] | None = None,
) -> list[Score]:
    """The scores of `completions`, each against its task item (`entries`, JSON), by task.rewards.

    What of a completion is scored is for task.extract to say; format, length and function see all of
    it. functions: of `function_sources`; None: as the files are now.

    A verifier that raises, dies or hangs gives status `error` or `timeout` with reward 0 and the
    reason, and is counted by the caller; it never stops the batch. Raises RecipeError as
    `function_sources`, and WorkerStartError where a worker process cannot be had.
    """
    task = settled(task)
    if functions is None:
        functions = function_sources(task)
    worker = shared_worker(task, functions) if _needs_worker(task) else None
    scorer = _Scorer(task, worker)
    return [scorer.score(text, entry) for text, entry in zip(completions, entries, strict=True)]


def require_rewards(task: Task, items: Mapping[str, dict[str, Any]]) -> None:
    """Raises RecipeError naming the key where task.rewards cannot be had: a function that is missing or
    takes other arguments, a package that is not installed, an answer that its verifier cannot read.

    items: one of each source where one is at hand, by the source's title; verifiers are tried on their
    answers. The user's code runs in a worker process only.
    """
    functions = function_sources(task)
    task = settled(task)
    with Worker(task, functions) as worker:
        if _needs_worker(task):
            try:
                worker.start()
            except WorkerStartError as error:
                raise RecipeError(str(error)) from None
        # The others may well find fault with it, and cost time.
        unasked = LengthVerifier(max_chars=1)
        asked = tuple(v if isinstance(v, _KNOW_THE_ANSWER) else unasked for v in task.rewards)
        scorer = _Scorer(task.model_copy(update={"rewards": asked}), worker)
        for source, entry in items.items():
            _require_right(scorer, asked, source, entry)


def _require_right(
    scorer: _Scorer, asked: tuple[AnyVerifier, ...], source: str, entry: dict[str, Any]
) -> None:
    """Raises RecipeError where one of `asked` does not find the reference answer of `entry` right."""
    parts = scorer.score(str(entry["answer"]), json.dumps(entry)).parts
    for index, (verifier, part) in enumerate(zip(asked, parts, strict=True)):
        if isinstance(verifier, _KNOW_THE_ANSWER) and part.status is not Status.OK:
            why = f" ({part.detail})" if part.detail else ""
            raise RecipeError(
                f"task.rewards.{index}: {verifier.kind} finds {source}'s own answer "
                f"{entry['answer']!r} {part.status}{why}. Choose another kind, or another task.extract"
            )


def _needs_worker(task: Task) -> bool:
    return any(verifier.isolation for verifier in task.rewards)


def count_statuses(statuses: list[str], *, timeouts: bool = False) -> dict[str, int]:
    """How many completions ended in each status, the empty ones included; timeouts: whether there can
    be any, which only a verifier in a worker process has."""
    counts = Counter(statuses)
    shown = [status for status in Status if timeouts or status is not Status.TIMEOUT]
    return {status.value: counts.get(status.value, 0) for status in shown}
