"""What a run amounts to: metrics of an iteration, the summary of a run, a table of several."""

import math
import statistics
from collections.abc import Callable
from typing import Any

from fp8rl.device import resolve
from fp8rl.journal import StepRecord
from fp8rl.recipe.schema import Recipe

# What follows new weights; all that the iteration which a run starts from has.
PUBLISHING = ("requantize", "recalibrate_kv")
STEPS = ("rollout", "reward", "train", *PUBLISHING)


def merged_metrics(records: list[dict[str, Any]]) -> dict[str, float]:
    """The metrics of all step records of an iteration, as one."""
    return {key: value for record in records for key, value in record["metrics"].items()}


def iteration_metrics(
    records: list[dict[str, Any]], seconds: float, recipe: Recipe
) -> dict[str, float]:
    """All metrics of one iteration, from its step records and its wall time.

    tokens/s/GPU: prompt and response tokens of the iteration / its whole wall time / devices (a CPU
    machine counts as one). learner tokens/s: the same tokens / the train step's time.
    """
    metrics = merged_metrics(records)
    metrics |= {f"timing/{record['step']}_s": record["seconds"] for record in records}
    train = next(record for record in records if record["step"] == "train")
    tokens = train["output"]["tokens"]
    metrics["timing/iteration_s"] = seconds
    metrics["perf/tokens_per_sec_per_gpu"] = tokens / seconds / resolve(recipe).devices
    metrics["perf/learner_tokens_per_sec"] = tokens / train["seconds"]
    return metrics


# By their names in the summary. Those in BF16 are there where the recipe asks for them.
_IN_BF16 = {"val_bf16_accuracy": "val_bf16/accuracy", "val_bf16_greedy": "val_bf16/greedy_accuracy"}


def summarise(records: list[StepRecord]) -> dict[str, Any]:
    """The summary of a run, finished or not, from the records of its iterations.

    A figure that nothing was measured of is NaN. Accuracies before the first and after the last
    iteration, and of the best evaluation (the first of equal ones; best_iteration, else None).
    Mismatch, entropy, length, throughput and times: median over the iterations after the first, which
    warms caches up (the first where it is the only one); of the mismatch also the worst of all. KV
    cache: greatest use of an iteration, and all preemptions. guard_fired: iterations in which a rule of
    the guard did.
    """
    # Of a run that was made shorter the last iteration has no evaluation.
    evaluated = [r for r in records if any(name.startswith("val/") for name in r.metrics)]
    first, last = (evaluated[0].metrics, evaluated[-1].metrics) if evaluated else ({}, {})
    sampled = [record for record in evaluated if "val/accuracy" in record.metrics]
    best = max(sampled, key=lambda record: record.metrics["val/accuracy"], default=None)
    trained = records[1:]

    def over(reduce: Callable[[list[float]], float], name: str, of: list[StepRecord]) -> float:
        # Iterations of an older version did not measure everything.
        values = [record.metrics[name] for record in of if name in record.metrics]
        return reduce(values) if values else math.nan

    def median(name: str) -> float:
        return over(_median, name, steady(records))

    return {
        "iterations": records[-1].iteration if records else 0,
        "val_accuracy_before": first.get("val/accuracy", math.nan),
        "val_accuracy_after": last.get("val/accuracy", math.nan),
        "val_accuracy_best": best.metrics["val/accuracy"] if best else math.nan,
        "best_iteration": best.iteration if best else None,
        "val_greedy_before": first.get("val/greedy_accuracy", math.nan),
        "val_greedy_after": last.get("val/greedy_accuracy", math.nan),
        **{
            f"{key}_{when}": metrics[metric]
            for key, metric in _IN_BF16.items()
            for when, metrics in (("before", first), ("after", last))
            if metric in metrics
        },
        "token_mult_prob_error": median("mismatch/token_mult_prob_error"),
        "token_mult_prob_error_max": over(_highest, "mismatch/token_mult_prob_error", trained),
        "kl_k3": median("mismatch/kl_k3"),
        "ess": median("mismatch/ess"),
        "ess_min": over(_lowest, "mismatch/ess", trained),
        "entropy": median("rollout/entropy"),
        "response_length": median("rollout/response_length_mean"),
        "tokens_per_sec_per_gpu": median("perf/tokens_per_sec_per_gpu"),
        "rollout_tokens_per_sec": median("perf/rollout_tokens_per_sec"),
        "learner_tokens_per_sec": median("perf/learner_tokens_per_sec"),
        "kv_peak_use": over(max, "kv/peak_use", trained),
        "kv_preemptions": over(sum, "kv/preemptions", trained),
        "guard_fired": sum(r.metrics.get("guard/fired", 0.0) > 0 for r in trained)
        if trained
        else math.nan,
        "iteration_s": median("timing/iteration_s"),
        "steps_s": {step: median(f"timing/{step}_s") for step in STEPS},
    }


def _median(values: list[float]) -> float:
    """Of what is a number: one bad iteration is told by the worst of them."""
    return statistics.median([v for v in values if not math.isnan(v)] or [math.nan])


def _highest(values: list[float]) -> float:
    """NaN is the worst there can be."""
    return max(values, key=lambda value: (math.isnan(value), value))


def _lowest(values: list[float]) -> float:
    return -_highest([-value for value in values])


def steady(records: list[StepRecord]) -> list[StepRecord]:
    """Of a run's iterations those whose times count: without the first weights and the first iteration,
    which warms caches up, unless there is no other."""
    return records[2:] or records[1:]


# (label, key in the summary, format)
ROWS = (
    ("sampled accuracy before", "val_accuracy_before", "{:.1%}"),
    ("sampled accuracy after", "val_accuracy_after", "{:.1%}"),
    ("sampled accuracy, best evaluation", "val_accuracy_best", "{:.1%}"),
    ("greedy accuracy before", "val_greedy_before", "{:.1%}"),
    ("greedy accuracy after", "val_greedy_after", "{:.1%}"),
    ("  in BF16, sampled, before", "val_bf16_accuracy_before", "{:.1%}"),
    ("  in BF16, sampled, after", "val_bf16_accuracy_after", "{:.1%}"),
    ("  in BF16, greedy, before", "val_bf16_greedy_before", "{:.1%}"),
    ("  in BF16, greedy, after", "val_bf16_greedy_after", "{:.1%}"),
    ("mismatch (token_mult_prob_error)", "token_mult_prob_error", "{:.4f}"),
    ("mismatch, worst iteration", "token_mult_prob_error_max", "{:.4f}"),
    ("KL rollout || learner (k3)", "kl_k3", "{:.2e}"),
    ("effective sample size", "ess", "{:.4f}"),
    ("effective sample size, worst iteration", "ess_min", "{:.4f}"),
    ("entropy of what was sampled (nats)", "entropy", "{:.3f}"),
    ("response length (tokens)", "response_length", "{:.1f}"),
    ("tokens/s/GPU", "tokens_per_sec_per_gpu", "{:,.0f}"),
    ("  rollout tokens/s", "rollout_tokens_per_sec", "{:,.0f}"),
    ("  learner tokens/s", "learner_tokens_per_sec", "{:,.0f}"),
    ("KV cache, peak use", "kv_peak_use", "{:.0%}"),
    ("KV cache, preemptions", "kv_preemptions", "{:.0f}"),
    ("iterations in which the guard fired", "guard_fired", "{:.0f}"),
    ("time of an iteration (s)", "iteration_s", "{:.2f}"),
)


def comparison_rows(arms: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Rows of text, a label and one cell for each arm: the side-by-side table."""
    cells = {key: [arm.get(key, math.nan) for arm in arms.values()] for _, key, _ in ROWS}
    rows = [
        [label, *("-" if math.isnan(value) else fmt.format(value) for value in cells[key])]
        for label, key, fmt in ROWS
        if not all(map(math.isnan, cells[key]))
    ]
    rows += [
        [f"  {step} (s)", *(f"{arm['steps_s'][step]:.2f}" for arm in arms.values())] for step in STEPS
    ]
    return rows
