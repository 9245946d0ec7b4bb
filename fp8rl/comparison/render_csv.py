"""A comparison as CSV: a row for each run, and a row for each arm. Numbers are whole, not rounded."""

import csv
import io
import math
from collections.abc import Iterable, Mapping
from typing import Any

from fp8rl.comparison.compare import Arm, Comparison
from fp8rl.comparison.gather import RunData
from fp8rl.comparison.page import arm_figures
from fp8rl.comparison.statistics import Estimate
from fp8rl.report import ROWS

# A spreadsheet takes text that begins so for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
_FIGURES = tuple(key for _, key, _ in ROWS)


def runs_csv(comparison: Comparison) -> str:
    """run, arm, seed, state and why, iterations, the figures of the run's summary, shares of the time,
    firings of the guard, machine."""
    return _csv([_run(run) for run in comparison.runs])


def arms_csv(comparison: Comparison) -> str:
    """arm, verdict, accuracies and differences with their intervals, speed, means of the figures."""
    return _csv([_arm(arm) for arm in comparison.arms])


def _run(run: RunData) -> dict[str, Any]:
    host, cpu, cores = run.machine or ("several", "several", "")
    return {
        "run": run.name,
        "arm": run.arm,
        "seed": run.seed,
        "state": run.state.state,
        "reason": run.state.reason,
        "iterations_done": run.done,
        "iterations": run.recipe.iterations,
        "last_evaluated": run.last.iteration if run.last else None,
        "best_iteration": run.figures["best_iteration"],
        **{key: run.figures[key] for key in _FIGURES},
        **{f"share_{step}": value for step, value in run.shares.items()},
        "guard": "; ".join(f"{rule}: {count}" for rule, count in sorted(run.firings.items())),
        **{"device": run.device, "host": host, "cpu": cpu, "cores": cores},
    }


def _arm(arm: Arm) -> dict[str, Any]:
    difference = arm.difference
    return {
        "arm": arm.name,
        "runs": len(arm.runs),
        "verdict": arm.verdict.word.value if arm.verdict else None,
        "why": arm.verdict.why if arm.verdict else None,
        **_estimate("accuracy_last", arm.last),
        **_estimate("accuracy_best", arm.best),
        **_estimate("greedy_last", arm.greedy),
        "paired_seeds": len(difference.iterations) if difference else 0,
        **_estimate("difference", difference.sampled if difference else None),
        **_estimate("greedy_difference", difference.greedy if difference else None),
        "speed_ratio_to_reference": arm.speed,
        **{f"mean_{key}": arm_figures(arm, key) for key in _FIGURES},
    }


def _estimate(name: str, one: Estimate | None) -> dict[str, Any]:
    values = (None, None, None) if one is None else (one.mean, one.low, one.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))


def _csv(rows: list[Mapping[str, Any]]) -> str:
    columns = dict.fromkeys(key for row in rows for key in row)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(_cells(row.get(column) for column in columns) for row in rows)
    return file.getvalue()


def _cells(values: Iterable[Any]) -> list[Any]:
    return [_cell(value) for value in values]


def _cell(value: Any) -> Any:
    """Numbers as they are; what is not known, empty; text so that no spreadsheet runs it."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return value
