"""Differences between what two sides saw, and what they say."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fp8rl.layerwise.points import Seen


@dataclass(frozen=True)
class Difference:
    """At one point of a layer. differ: share of elements that are not equal. relative: norm of the
    difference over the norm of the engine's. largest: |difference| in the point's own unit."""

    layer: int
    point: str
    differ: float
    relative: float
    largest: float


def differences(engine: Seen, other: Seen, layers: int) -> list[Difference]:
    """At every point that both saw, in the order in which a model of `layers` computes them."""
    found = []
    for key in engine.ordered(layers):
        if key not in engine.points or key not in other.points:
            continue
        a, b = engine[key].float(), other[key].float()
        gap = b - a
        norm = float(torch.linalg.vector_norm(a))
        found.append(
            Difference(
                *key,
                differ=float((gap != 0).double().mean()),
                relative=float(torch.linalg.vector_norm(gap)) / norm if norm else 0.0,
                largest=float(gap.abs().max()),
            )
        )
    return found


def first(found: Iterable[Difference]) -> Difference | None:
    """The first that is none at all, None where all are equal bit for bit."""
    return next((one for one in found if one.differ > 0), None)


@dataclass(frozen=True)
class PointSummary:
    """A point over all layers. made: by the learner's operation itself, on the engine's input. grown:
    between the two sides, each on its own. Shares of elements, and relative differences."""

    point: str
    made_share: float
    made_most: float
    made_relative: float
    grown_first: float
    grown_last: float


def summary(made: list[Difference], grown: list[Difference]) -> list[PointSummary]:
    """One row a point, in the order of a layer."""
    rows = []
    for point in dict.fromkeys(one.point for one in grown):
        own = [one for one in made if one.point == point]
        all_ = [one.relative for one in grown if one.point == point]
        shares = [one.differ for one in own] or [0.0]
        relative = [one.relative for one in own] or [0.0]
        rows.append(
            PointSummary(
                point,
                made_share=sum(shares) / len(shares),
                made_most=max(shares),
                made_relative=sum(relative) / len(relative),
                grown_first=all_[0],
                grown_last=all_[-1],
            )
        )
    return rows


def verdict(made: list[Difference], grown: list[Difference]) -> list[str]:
    """Where the first difference is made, and how it grows, in words."""
    at = first(made)
    if at is None and first(grown) is None:
        return ["Engine and learner are equal bit for bit, at every point of every layer."]
    lines = []
    if at is None:
        lines.append("Every operation of the learner is the engine's, bit for bit, given its input.")
    else:
        lines.append(
            f"First difference made: layer {at.layer}, {at.point}: {at.differ:.2g} of its elements, "
            f"relative {at.relative:.2g}."
        )
        others = dict.fromkeys(one.point for one in made if one.differ > 0)
        lines.append(f"Points where the learner makes one: {', '.join(others)}.")
    stream = [one for one in grown if one.point == "residual"]
    lines.append(
        f"It grows from {stream[0].relative:.2g} of the stream at the first layer to "
        f"{stream[-1].relative:.2g} at the last."
    )
    return lines


def plain(found: Iterable[Difference]) -> list[dict[str, Any]]:
    """For a JSON file."""
    return [asdict(one) for one in found]
