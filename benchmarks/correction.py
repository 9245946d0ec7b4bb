"""`make bench-correction`: ways to correct an FP8 rollout, side by side on the tiny recipe.

Each mode trains configs/tiny/fp8-rollout-kv.yaml to its end, once per seed, through the whole pipeline;
all modes of a seed start from the same weights. Written: benchmarks/results/correction.json (means over
the seeds, and each run) and docs/correction.png.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.commands import fp8rl
from fp8rl.comparison.gather import series_of
from fp8rl.comparison.plots import MAIN, panels, plot_curves
from fp8rl.files import write_atomic
from fp8rl.journal import Journal

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "tiny" / "fp8-rollout-kv.yaml"
PLOT = ROOT / "docs" / "correction.png"
SEEDS = (0, 1)
# The bounds of the sequence rule: about twice the usual difference of this model's sequences, so that
# it has something to reject.
MODES = {
    "none": ["correction.mode=off", "correction.allow_off_with_fp8=true"],
    "tis": ["correction.mode=token", "correction.truncate=2.0"],
    "icepop": ["correction.mode=token", "correction.bound=icepop"],
    "sequence_rejection": [
        "correction.mode=off",
        "correction.reject=[{by: k1, level: sequence_mean, high: 1.02}]",
    ],
}


def summary(journal: Journal) -> dict[str, float]:
    """Of one run. Accuracy after the last iteration; the rest: medians over the iterations, and the
    worst mismatch. share_kept: of the response tokens, those trained on. weight_ess: of the weights as
    applied."""
    records = journal.iterations()[1:]
    last = records[-1].metrics

    def median(name: str) -> float:
        return statistics.median(r.metrics[name] for r in records)

    return {
        "accuracy": last["val/accuracy"],
        "greedy_accuracy": last["val/greedy_accuracy"],
        "mismatch": median("mismatch/token_mult_prob_error"),
        "mismatch_worst": max(r.metrics["mismatch/token_mult_prob_error"] for r in records),
        "ess": median("mismatch/ess"),
        "share_kept": median("correction/kept_tokens"),
        "share_bounded": median("correction/share_above") + median("correction/share_below"),
        "weight_ess": median("correction/weight_ess"),
    }


def measure(folder: Path, more: list[str], console: Console) -> dict[str, Any]:
    """Trains every mode and seed in `folder`; raises RuntimeError where a run does not end."""
    runs, found = folder / "runs", {}
    for seed in SEEDS:
        for mode, keys in MODES.items():
            name = f"{mode}-{seed}"
            with console.status(f"{mode}, seed {seed}"):
                fp8rl(
                    folder / "log.txt",
                    *("run", str(CONFIG), f"runs_dir={runs}", f"name={name}", f"seed={seed}"),
                    *(*keys, *more),
                )
            found[name] = summary(Journal(runs / name))
    series = {
        mode: [series_of(Journal(runs / f"{mode}-{seed}").iterations()) for seed in SEEDS]
        for mode in MODES
    }
    modes = {}
    for mode in MODES:
        each = [found[f"{mode}-{seed}"] for seed in SEEDS]
        modes[mode] = {key: statistics.fmean(one[key] for one in each) for key in each[0]}
        modes[mode]["by_seed"] = each
    picture = plot_curves(panels(series, MAIN))
    write_atomic(PLOT if not more else folder / "correction.png", picture)
    return {"recipe": "configs/tiny/fp8-rollout-kv", "seeds": list(SEEDS), "modes": modes}


def print_result(result: dict[str, Any], console: Console) -> None:
    table = Table(title="An FP8 rollout, corrected in several ways")
    keys = [key for key in next(iter(result["modes"].values())) if key != "by_seed"]
    for heading in ("mode", *keys):
        table.add_column(heading.replace("_", " "), justify="right")
    for mode, values in result["modes"].items():
        table.add_row(mode, *(f"{values[key]:.4f}" for key in keys))
    console.print(table)


def main(arguments: list[str]) -> None:
    """arguments: recipe values to change, for a trial; then nothing is written."""
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), arguments, console)
    print_result(result, console)
    if arguments:
        console.print(json.dumps(result))
    else:
        console.print(f"written: {record.write('correction', result)}, {PLOT}")


if __name__ == "__main__":
    main(sys.argv[1:])
