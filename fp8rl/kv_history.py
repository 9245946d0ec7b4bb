"""The history of a run's KV scales: by version and layer, with what the cache could not hold.

From the journal alone, so it is there again after a crash. Imports without torch.
"""

import io
from typing import Any

from fp8rl.journal import Journal
from fp8rl.model.kv_scales import KvScales

_SHARES = ("k_saturated", "v_saturated", "k_underflow", "v_underflow")


def kv_history(journal: Journal) -> dict[str, list[Any]]:
    """Columns, a row for each version and layer: version, layer (from 0), side, statistic, q_scale,
    k_scale, v_scale, and the shares k_saturated, v_saturated, k_underflow, v_underflow of the elements
    that the next rollout wrote with them; NaN where none has. Without rows for a BF16 cache.

    Raises JournalError for a record or a file that is damaged.
    """
    names = ("version", "layer", "side", "statistic", "q_scale", "k_scale", "v_scale", *_SHARES)
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for version in sorted(n for n, step in journal.steps() if step == "recalibrate_kv"):
        if not journal.record(version, "recalibrate_kv").files:
            continue
        content = journal.read_file(version, "recalibrate_kv", "kv_scales.json")
        scales = KvScales.from_json(content.decode())
        counts = None
        if journal.is_committed(version + 1, "rollout"):
            counts = journal.record(version + 1, "rollout").output["kv"]
        for number, layer in enumerate(scales.layers):
            row = (version, number, scales.side, scales.statistic, layer.q, layer.k, layer.v)
            shares = [
                float("nan") if counts is None else counts[name][number] / counts["elements"][number]
                for name in _SHARES
            ]
            for name, value in zip(names, (*row, *shares), strict=True):
                columns[name].append(value)
    return columns


def plot_kv_history(columns: dict[str, list[Any]]) -> bytes:
    """A PNG of `kv_history`: K and V scales by version, a line for each layer; saturated and
    underflowed shares by version, over all layers and in the worst one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    versions = sorted(set(columns["version"]))
    layers = sorted(set(columns["layer"]))
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8))
    colours = plt.get_cmap("viridis")
    for axis, name in zip(axes, ("k_scale", "v_scale"), strict=False):
        for layer in layers:
            rows = zip(columns["version"], columns["layer"], columns[name], strict=True)
            points = [(version, value) for version, number, value in rows if number == layer]
            colour = colours(layer / max(len(layers) - 1, 1))
            axis.plot(*zip(*points, strict=True), color=colour, marker=".", linewidth=1)
        axis.set_yscale("log")
        axis.set_title(f"{name} by layer (first dark, last light)", fontsize=10)
    for what, colour in (("saturated", "C3"), ("underflow", "C0")):
        shares: dict[int, list[float]] = {version: [] for version in versions}
        for name in (f"k_{what}", f"v_{what}"):
            for version, share in zip(columns["version"], columns[name], strict=True):
                shares[version].append(share)
        means = [sum(found) / len(found) for found in shares.values()]
        axes[2].plot(versions, means, color=colour, marker=".", label=f"{what}, all layers")
        worst = [max(found) for found in shares.values()]
        axes[2].plot(versions, worst, color=colour, linestyle=":", label=f"{what}, worst layer")
    axes[2].set_yscale("symlog", linthresh=1e-6)
    axes[2].set_title("share of K and V elements in the next rollout", fontsize=10)
    axes[2].legend(fontsize=8)
    for axis in axes:
        axis.set_xlabel("weight version")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    plt.close(figure)
    return image.getvalue()
