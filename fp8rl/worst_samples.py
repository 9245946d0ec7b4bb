"""The samples on which rollout and learner agreed least, as the train step kept them, to look at."""

import io
from typing import Any

from fp8rl.journal import Journal
from fp8rl.tables import from_parquet

FILE = "worst_samples.parquet"
_PLOTTED = 4


def read_worst(journal: Journal, iteration: int) -> dict[str, list[Any]]:
    """The columns of `learner.worst.worst_samples`; raises JournalError where they are damaged."""
    return from_parquet(journal.read_file(iteration, "train", FILE))


def worst_table(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """For a page: what is a list becomes text, log-probs rounded to four digits."""
    table = {name: columns[name] for name in ("error", "reward", "prompt_id", "sample", "text")}
    table |= {name: columns[name] for name in ("finish_reason", "weight_version")}
    table["tokens"] = [" ".join(map(str, row)) for row in columns["tokens"]]
    for name in ("rollout", "learner"):
        table[name] = [" ".join(map(_shown, row)) for row in columns[name]]
    return table


def _shown(value: float | None) -> str:
    return "missing" if value is None else f"{value:.4f}"


def plot_worst(columns: dict[str, list[Any]], iteration: int) -> bytes:
    """PNG: both log-probs over the tokens of the worst few samples, one panel for each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    count = min(_PLOTTED, len(columns["error"]))
    figure, axes = plt.subplots(count, 1, figsize=(9, 1.1 + 1.7 * count), squeeze=False)
    for row, axis in enumerate(axes[:, 0]):
        for name, colour in (("rollout", "#2a7de1"), ("learner", "#d1495b")):
            axis.plot(columns[name][row], color=colour, marker=".", linewidth=1, label=name)
        title = (
            f"prompt {columns['prompt_id'][row]}, sample {columns['sample'][row]}: "
            f"mean exp|g - p| {columns['error'][row]:.3f}, reward {columns['reward'][row]:g}"
        )
        axis.set_title(title, fontsize=9)
        axis.set_ylabel("log-prob", fontsize=8)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=8)
    axes[-1, 0].set_xlabel(f"response token (iteration {iteration})", fontsize=8)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100)
    plt.close(figure)
    return buffer.getvalue()
