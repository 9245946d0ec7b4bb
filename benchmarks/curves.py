"""`make bench-curves`: the mismatch of every arm over 30 iterations of the tiny recipe.

Written: benchmarks/results/curves.json and docs/parity_curves.png.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.commands import fp8rl
from benchmarks.pipeline import ARMS, CONFIGS
from fp8rl.journal import Journal

ITERATIONS = 30
PLOT = Path(__file__).parent.parent / "docs" / "parity_curves.png"
_METRIC = "mismatch/token_mult_prob_error"


def train(runs: Path, console: Console) -> None:
    """Trains what is not yet in `runs`. Raises RuntimeError where a run does not end."""
    for arm in ARMS:
        folder = runs / f"curve-{arm}"
        if folder.is_dir() and len(Journal(folder).iterations()) == ITERATIONS + 1:
            continue
        with console.status(arm):
            fp8rl(
                runs / "log.txt",
                *("run", str(CONFIGS / "tiny" / f"{arm}.yaml"), f"runs_dir={runs}"),
                *(f"name={folder.name}", f"iterations={ITERATIONS}", "evaluate.every=15"),
            )


def curve(journal: Journal) -> list[float]:
    """token_mult_prob_error of iterations 1 to the last."""
    return [one.metrics[_METRIC] for one in journal.iterations()[1:]]


def summary(journal: Journal) -> dict[str, Any]:
    """Of one run: the mismatch's course, and accuracy after the last iteration."""
    values = curve(journal)
    return {
        "median": statistics.median(values),
        "worst": max(values),
        "accuracy": journal.iterations()[-1].metrics["val/accuracy"],
        "token_mult_prob_error": values,
    }


def plot(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Excess of the mismatch over 1 by iteration, on a logarithmic axis. PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 4.8))
    floor = 1e-6
    for arm, one in found.items():
        excess = [max(value - 1, floor) for value in one["token_mult_prob_error"]]
        axis.plot(range(1, len(excess) + 1), excess, label=arm)
    axis.set_yscale("log")
    axis.set_ylim(floor / 2, None)
    axis.annotate("none at all", (1, floor), (3, 3), textcoords="offset points", fontsize=8)
    axis.set_xlabel("iteration")
    axis.set_ylabel("token_mult_prob_error - 1")
    axis.set_title("Mismatch of engine and learner, tiny recipe")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: list[str]) -> None:
    """arguments: a folder whose runs are taken, and where those that lack are trained."""
    console = Console()
    with tempfile.TemporaryDirectory() as temporary:
        runs = Path(arguments[0]) if arguments else Path(temporary)
        train(runs, console)
        found = {arm: summary(Journal(runs / f"curve-{arm}")) for arm in ARMS}
    table = Table(title="token_mult_prob_error over 30 iterations", title_justify="left")
    for heading in ("arm", "median", "worst", "accuracy"):
        table.add_column(heading, justify="right" if table.columns else "left")
    for name, one in found.items():
        table.add_row(name, f"{one['median']:.6f}", f"{one['worst']:.6f}", f"{one['accuracy']:.1%}")
    console.print(table)
    plot(found, PLOT)
    console.print(
        f"written: {record.write('curves', {'recipe': 'configs/tiny', 'runs': found})}, {PLOT}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
