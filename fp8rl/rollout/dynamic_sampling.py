"""Dynamic sampling: which groups an iteration keeps, and when it draws more prompts. Without torch.

A group whose rewards are all equal has advantage 0 and teaches nothing. So an iteration draws batches
of prompts until it has as many groups as it wants whose rewards differ (DAPO, arXiv 2503.14476,
equation 11). Raw rewards decide, what verifiers gave: a length penalty cannot make a group look
informative. Nothing but rewards decides: a sample whose verifier failed has reward 0 here as it has in
training, and may be what makes a group differ; the share of such samples of all drawn ones is logged.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Draw(StrEnum):
    """What dynamic sampling does next."""

    ENOUGH = "enough"
    AGAIN = "again"
    GIVE_UP = "give_up"  # the budget is spent: train on the groups that there are


def next_draw(kept_groups: int, *, wanted: int, drawn: int, budget: int) -> Draw:
    """After `drawn` batches of prompts with `kept_groups` informative groups among them.

    budget: batches of prompts that the iteration may draw.
    """
    if kept_groups >= wanted:
        return Draw.ENOUGH
    return Draw.AGAIN if drawn < budget else Draw.GIVE_UP


def by_group(rewards: Sequence[float], groups: Sequence[int]) -> dict[int, list[float]]:
    """The raw rewards of each group by its id, in the order in which the groups first appear.

    rewards, groups: of each sample. Raises ValueError for a reward that is NaN or infinite.
    """
    found: dict[int, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        if not math.isfinite(reward):
            raise ValueError(f"a reward of prompt {group} is NaN or Inf")
        found.setdefault(group, []).append(reward)
    return found


def informative_groups(rewards: Sequence[float], groups: Sequence[int]) -> list[int]:
    """Ids of the groups whose raw rewards are not all equal, in the order in which they first appear.

    Raises ValueError as `by_group`. Source: DAPO, equation 11.
    """
    return [g for g, found in by_group(rewards, groups).items() if min(found) < max(found)]


def choose_groups(rewards: Sequence[float], groups: Sequence[int], wanted: int) -> list[bool]:
    """Of each sample, whether it is of one of the first `wanted` informative groups.

    First in order of appearance, which is that of drawing. Ids are places in the data set, which is
    drawn in shuffled order: by ascending id, prompts from its end would be thrown away again and again.
    """
    first = set(informative_groups(rewards, groups)[:wanted])
    return [group in first for group in groups]


@dataclass(frozen=True)
class Selection:
    """kept: of each completion that was drawn, whether it is trained on. table: a row for each prompt
    that was drawn, with columns draw (from 0), prompt_id, rewards (of its samples), informative, kept.
    metrics: of all that was drawn.
    """

    kept: list[bool]
    table: dict[str, list[Any]]
    metrics: dict[str, float]


def select(
    groups: Sequence[Sequence[int]], rewards: Sequence[Sequence[float]], wanted: int
) -> Selection:
    """What is kept of an iteration's draws: the samples of the first `wanted` informative groups, and
    where there is none the first draw whole, so that there are tokens to train and calibrate on.

    groups, rewards: of each draw, the prompt id and raw reward of each sample. Raises ValueError where
    a prompt was drawn twice, and as `by_group`.
    """
    draw_of = {group: number for number, ids in enumerate(groups) for group in ids}
    if len(draw_of) != sum(len(set(ids)) for ids in groups):
        raise ValueError("a prompt was drawn twice in one iteration: its samples would be the same")
    ids = [group for draw in groups for group in draw]
    raw = [reward for draw in rewards for reward in draw]
    found, useful = by_group(raw, ids), set(informative_groups(raw, ids))
    kept = choose_groups(raw, ids, wanted)
    if not useful:
        kept = [draw_of[group] == 0 for group in ids]
    trained = {group for group, is_kept in zip(ids, kept, strict=True) if is_kept}
    table: dict[str, list[Any]] = {
        "draw": [draw_of[group] for group in found],
        "prompt_id": list(found),
        "rewards": list(found.values()),
        "informative": [group in useful for group in found],
        "kept": [group in trained for group in found],
    }
    metrics = {
        "rollout/draws": float(len(groups)),
        "rollout/groups_drawn": float(len(found)),
        "rollout/groups_informative": len(useful) / len(found),
        "rollout/groups_kept": float(len(useful & trained)),
        "rollout/reward_mean_drawn": statistics.fmean(raw),
    }
    return Selection(kept, table, metrics)
