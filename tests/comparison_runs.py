"""Runs to compare, made in no time: run folders with what a comparison reads, by the real journal."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fp8rl.journal import ITERATION, StepRecord
from fp8rl.lock import Owner
from fp8rl.recipe.load import with_overrides
from fp8rl.recipe.schema import Recipe
from fp8rl.report import STEPS
from fp8rl.runs import Run, State
from fp8rl.tables import to_parquet
from tests.folders import MACHINE, about

SAMPLES = 4
MEASURED = (
    *("train/reward_mean", "mismatch/token_mult_prob_error", "mismatch/kl_k3", "mismatch/ess"),
    *("rollout/entropy", "rollout/response_length_mean", "perf/tokens_per_sec_per_gpu"),
    *("perf/rollout_tokens_per_sec", "perf/learner_tokens_per_sec", "kv/peak_use", "kv/preemptions"),
)
FP8 = ("precision.rollout=fp8",)


def answers(generator: np.random.Generator, prompts: int, chance: float) -> dict[str, list[Any]]:
    """Columns of an evaluation.parquet: one greedy answer and SAMPLES sampled ones to each prompt."""
    kinds = ["greedy"] * prompts + ["sampled"] * prompts * SAMPLES
    ids = [*range(prompts), *(i for i in range(prompts) for _ in range(SAMPLES))]
    right = generator.random(len(ids)) < chance
    return {
        "prompt_id": ids,
        "kind": kinds,
        "text": ["x"] * len(ids),
        "reward": [float(one) for one in right],
        "status": ["ok" if one else "wrong" for one in right],
        "detail": [""] * len(ids),
    }


def make_run(
    runs: Path,
    arm: str | None,
    seed: int = 0,
    *,
    chances: Mapping[int, float] | None = None,
    prompts: int = 12,
    done: int = 4,
    state: str = "finished",
    overrides: Sequence[str] = (),
    name: str | None = None,
    host: str = "a host",
    data: str = "data",
    firings: Mapping[int, Sequence[str]] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> Run:
    """A run that came to iteration `done`, -1 for none; state: how it ended, "running" as after a kill.

    chances: {evaluated iteration: how likely an answer is right}; by default 0, 2 and 4. data: what
    its prompts are called. firings: {iteration: rules of the guard}. metrics: instead of random ones.
    """
    given = ("iterations=4", "evaluate.every=2", "threads=2", "precision.backend=reference")
    recipe = with_overrides(Recipe(), [*given, f"seed={seed}", *overrides])
    recipe = recipe.model_copy(update={"arm": arm, "name": None, "runs_dir": str(runs)})
    number = len(list(runs.glob("*"))) if runs.exists() else 0
    run, lock = Run.create(runs, name or f"run-{number}", recipe, about(recipe))
    owner = Owner.this_process()
    attempt = run.begin_attempt(
        {
            **{"host": host, "pid": owner.pid, "started": time.time()},
            **{"machine": MACHINE, "backends": {"device": "cpu"}, "prefect_flow_run": "flow"},
        }
    )
    generator = np.random.default_rng([seed, *(arm or "").encode()])
    evaluated = {0: 0.3, 2: 0.6, 4: 0.8} if chances is None else chances
    for n in range(done + 1):
        found = {} if n == 0 else _train(run, generator, n, (firings or {}).get(n, ()), metrics or {})
        if n in evaluated:
            found |= _evaluate(run, generator, n, prompts, evaluated[n], f"{data} {seed}")
        run.journal.commit(StepRecord(ITERATION, n, 1.0, metrics=found), {})
    if state != "running":
        run.end_attempt(attempt, State(state, f"it is {state}"))
    lock.release()
    return run


def _train(
    run: Run,
    generator: np.random.Generator,
    n: int,
    rules: Sequence[str],
    given: Mapping[str, float],
) -> dict[str, float]:
    firing = {"metric": "m", "value": 1.0, "breaches": 1, "of": 1, "actions": ["warn"]}
    if rules:
        fired = [{"rule": rule, **firing} for rule in rules]
        output = {"guard": {"firings": fired, "masked": 0, "skipped": False}}
        run.journal.commit(StepRecord("train", n, 1.0, output=output), {})
    found = {key: float(1 + generator.random()) for key in MEASURED}
    steps = {f"timing/{step}_s": float(generator.random()) for step in STEPS}
    between = float(generator.random())
    whole = {"timing/iteration_s": sum(steps.values()) + between, "guard/fired": float(len(rules))}
    return found | steps | whole | dict(given)


def _evaluate(
    run: Run, generator: np.random.Generator, n: int, prompts: int, chance: float, data: str
) -> dict[str, float]:
    table = answers(generator, prompts, chance)
    entries = {i: json.dumps({"question": f"{data}, {i}", "answer": str(i)}) for i in range(prompts)}
    table["entry"] = [entries[i] for i in table["prompt_id"]]
    right = [
        (kind, status == "ok") for kind, status in zip(table["kind"], table["status"], strict=True)
    ]
    metrics = {
        "val/accuracy": float(np.mean([ok for kind, ok in right if kind == "sampled"])),
        "val/greedy_accuracy": float(np.mean([ok for kind, ok in right if kind == "greedy"])),
    }
    record = StepRecord("evaluate", n, 0.1, inputs={"prompts": data}, metrics=metrics)
    run.journal.commit(record, {"evaluation.parquet": to_parquet(table)})
    return metrics
