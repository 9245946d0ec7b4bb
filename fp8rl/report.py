"""What a run amounts to: metrics of an iteration, the summary of a run, tables and plots of arms."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8rl.device import resolve
from fp8rl.journal import Journal
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


# By their names in the summary. None where the recipe does not ask for it.
_ACCURACIES = {
    "val_accuracy": "val/accuracy",
    "val_greedy": "val/greedy_accuracy",
    "val_bf16_accuracy": "val_bf16/accuracy",
    "val_bf16_greedy": "val_bf16/greedy_accuracy",
}


def summarise(journal: Journal) -> dict[str, Any]:
    """The summary of a run whose iterations are done.

    Accuracies before the first and after the last iteration; mismatch, throughput and times: median
    over the iterations after the first, which warms caches up (the first where it is the only one).
    KV cache: greatest use of an iteration, and all preemptions. guard_fired: iterations in which a rule
    of the guard did.
    """
    records = journal.iterations()
    # Of a run that was made shorter the last iteration has no evaluation.
    evaluated = [r.metrics for r in records if any(name.startswith("val/") for name in r.metrics)]
    first, last = evaluated[0], evaluated[-1]
    steady = records[2:] or records[1:]

    def median(name: str) -> float:
        return statistics.median(record.metrics[name] for record in steady)

    def pressure(name: str, over: Callable[[list[float]], float]) -> float | None:
        # Iterations of an older version did not measure it.
        found = [r.metrics[name] for r in records[1:] if name in r.metrics]
        return over(found) if found else None

    return {
        "iterations": records[-1].iteration,
        **{
            f"{key}_{when}": metrics.get(metric)
            for key, metric in _ACCURACIES.items()
            for when, metrics in (("before", first), ("after", last))
        },
        "token_mult_prob_error": median("mismatch/token_mult_prob_error"),
        "token_mult_prob_error_max": max(
            r.metrics["mismatch/token_mult_prob_error"] for r in records[1:]
        ),
        "kl_k3": median("mismatch/kl_k3"),
        "tokens_per_sec_per_gpu": median("perf/tokens_per_sec_per_gpu"),
        "rollout_tokens_per_sec": median("perf/rollout_tokens_per_sec"),
        "learner_tokens_per_sec": median("perf/learner_tokens_per_sec"),
        "kv_peak_use": pressure("kv/peak_use", max),
        "kv_preemptions": pressure("kv/preemptions", sum),
        "guard_fired": sum(r.metrics.get("guard/fired", 0.0) > 0 for r in records[1:]),
        "iteration_s": median("timing/iteration_s"),
        "steps_s": {step: median(f"timing/{step}_s") for step in STEPS},
    }


# (label, key in the summary, format)
_ROWS = (
    ("sampled accuracy before", "val_accuracy_before", "{:.1%}"),
    ("sampled accuracy after", "val_accuracy_after", "{:.1%}"),
    ("greedy accuracy before", "val_greedy_before", "{:.1%}"),
    ("greedy accuracy after", "val_greedy_after", "{:.1%}"),
    ("  in BF16, sampled, before", "val_bf16_accuracy_before", "{:.1%}"),
    ("  in BF16, sampled, after", "val_bf16_accuracy_after", "{:.1%}"),
    ("  in BF16, greedy, before", "val_bf16_greedy_before", "{:.1%}"),
    ("  in BF16, greedy, after", "val_bf16_greedy_after", "{:.1%}"),
    ("mismatch (token_mult_prob_error)", "token_mult_prob_error", "{:.4f}"),
    ("mismatch, worst iteration", "token_mult_prob_error_max", "{:.4f}"),
    ("KL rollout || learner (k3)", "kl_k3", "{:.2e}"),
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
    rows = [
        [label, *("-" if arm[key] is None else fmt.format(arm[key]) for arm in arms.values())]
        for label, key, fmt in _ROWS
        if any(arm[key] is not None for arm in arms.values())
    ]
    rows += [
        [f"  {step} (s)", *(f"{arm['steps_s'][step]:.2f}" for arm in arms.values())] for step in STEPS
    ]
    return rows


def plot_arms(journals: dict[str, Journal], path: Path) -> None:
    """Accuracy, reward and mismatch over the iterations, one line for each arm, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = (
        ("val/accuracy", "Validation accuracy (sampled)"),
        ("train/reward_mean", "Mean reward of the samples"),
        ("mismatch/token_mult_prob_error", "Mismatch (token_mult_prob_error)"),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 3.8))
    for arm, journal in journals.items():
        records = journal.iterations()
        for axis, (name, title) in zip(axes, panels, strict=True):
            points = [(r.iteration, r.metrics[name]) for r in records if name in r.metrics]
            axis.plot(*zip(*points, strict=True), label=arm, marker="o" if len(points) < 15 else None)
            axis.set_title(title, fontsize=10)
            axis.set_xlabel("iteration")
            axis.grid(alpha=0.3)
    axes[0].set_ylim(0, 1)
    axes[1].set_ylim(0, 1)
    axes[0].legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
