"""What the journal of one run says that a comparison needs. Reads whole iterations only, so that a run
may go on while it is read."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fp8rl import guard
from fp8rl.comparison.selection import arm_of
from fp8rl.journal import Journal, StepRecord
from fp8rl.recipe.schema import Recipe
from fp8rl.report import ROWS, STEPS, steady, summarise
from fp8rl.runs import Run, State
from fp8rl.samples import evaluation_table

# {metric: {iteration: value}}
Series = dict[str, dict[int, float]]


@dataclass(frozen=True)
class Evaluation:
    """Answers to validation prompts, a row for each prompt. prompts: what a prompt is, the same text in
    every run that has it. sampled: share of its sampled answers that are right. greedy: 1 or 0.
    """

    iteration: int
    prompts: tuple[str, ...]
    sampled: np.ndarray
    greedy: np.ndarray


@dataclass(frozen=True)
class RunData:
    """figures: see report.summarise. prompts_digest: of its validation prompts; None before the first
    evaluation. machine: host, CPU and cores; None where its attempts had several. shares: of the wall
    time of an iteration, by step. firings: {rule of the guard: how often it fired}.
    """

    name: str
    arm: str
    seed: int
    recipe: Recipe
    state: State
    done: int
    figures: dict[str, Any]
    series: Series
    evaluations: dict[int, Evaluation]
    prompts_digest: str | None
    machine: tuple[str, str, int] | None
    device: str
    shares: dict[str, float]
    firings: dict[str, int] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether its last iteration is there."""
        return self.done >= self.recipe.iterations

    @property
    def last(self) -> Evaluation | None:
        """Its latest evaluation."""
        return self.evaluations[max(self.evaluations)] if self.evaluations else None

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the highest accuracy, the first of equal ones."""
        number = self.figures["best_iteration"]
        return None if number is None else self.evaluations[number]


def gather(run: Run) -> RunData:
    """Reads `run`; raises JournalError for a damaged record or file of it, naming it."""
    journal, recipe = run.journal, run.recipe
    records = journal.iterations()  # once: there may be more by now
    numbers = [record.iteration for record in records if "val/accuracy" in record.metrics]
    prompts = {journal.record(n, "evaluate").inputs["prompts"] for n in numbers}
    attempts = run.attempts()
    machines = {_machine(attempt) for attempt in attempts}
    return RunData(
        name=run.name,
        arm=arm_of(recipe),
        seed=recipe.seed,
        recipe=recipe,
        state=run.state(),
        done=records[-1].iteration if records else run.origin,
        figures=dict.fromkeys((key for _, key, _ in ROWS), math.nan) | summarise(records),
        series=series_of(records),
        evaluations={number: read_evaluation(journal, number) for number in numbers},
        prompts_digest=prompts.pop() if prompts else None,
        machine=machines.pop() if len(machines) == 1 else None,
        device=str(attempts[-1]["backends"]["device"]) if attempts else "unknown",
        shares=time_shares(steady(records)),
        firings=dict(Counter(guard.events(journal)["rule"])),
    )


def _machine(attempt: dict[str, Any]) -> tuple[str, str, int]:
    about = attempt["machine"]
    return str(attempt["host"]), str(about["cpu"]), int(about["cores"])


def series_of(records: list[StepRecord]) -> Series:
    """Every metric of the iterations."""
    found: Series = {}
    for record in records:
        for name, value in record.metrics.items():
            found.setdefault(name, {})[record.iteration] = value
    return found


def read_evaluation(journal: Journal, iteration: int) -> Evaluation:
    """Raises JournalError where the iteration was not evaluated, or its file is damaged."""
    table = evaluation_table(journal, iteration)
    right = [status == "ok" for status in table["status"]]
    sampled: dict[int, list[bool]] = {}
    greedy: dict[int, bool] = {}
    texts: dict[int, str] = {}
    rows = zip(table["prompt_id"], table["kind"], right, table["prompt"], table["answer"], strict=True)
    for prompt, kind, is_right, question, answer in rows:
        texts[prompt] = f"{question}\0{answer}"
        if kind == "greedy":
            greedy[prompt] = is_right
        else:
            sampled.setdefault(prompt, []).append(is_right)
    numbers = list(sampled)
    seen: Counter[str] = Counter()
    names = []
    for prompt in numbers:  # a text that stands there twice is two prompts
        seen[texts[prompt]] += 1
        names.append(f"{texts[prompt]}\0{seen[texts[prompt]]}")
    return Evaluation(
        iteration,
        tuple(names),
        np.array([sum(sampled[n]) / len(sampled[n]) for n in numbers]),
        np.array([float(greedy[n]) for n in numbers]),
    )


def time_shares(records: list[StepRecord]) -> dict[str, float]:
    """Share of each step in the wall time of iterations; "other" is what is between the steps. Empty
    where no iteration was trained."""
    whole = sum(record.metrics.get("timing/iteration_s", 0.0) for record in records)
    if not whole:
        return {}
    shares = {
        step: sum(record.metrics.get(f"timing/{step}_s", 0.0) for record in records) / whole
        for step in STEPS
    }
    return shares | {"other": max(0.0, 1 - sum(shares.values()))}
