"""Saturation and underflow of the KV cache as shares, from the counts of a rollout's chunks.

Imports without torch: the counts are made by kv_writes.py, in the engine.
"""

Counts = dict[str, list[int]]


def total(chunks: list[Counts]) -> Counts:
    """The counts of several chunks as one; each number is of a layer."""
    return {
        name: [sum(numbers) for numbers in zip(*(chunk[name] for chunk in chunks), strict=True)]
        for name in chunks[0]
    }


def kv_metrics(counts: Counts) -> dict[str, float]:
    """Shares of all elements of K and V that were written, over all layers.

    kv/saturated_share: above 448 times the descale. kv/underflow_share: not zero and stored as zero.
    """
    elements = 2 * sum(counts["elements"])
    return {
        f"kv/{what}_share": (sum(counts[f"k_{what}"]) + sum(counts[f"v_{what}"])) / elements
        for what in ("saturated", "underflow")
    }
