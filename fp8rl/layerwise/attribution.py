"""Which layers and kinds of linears FP8 makes the mismatch, and which few are best kept in BF16.

A learner whose linears are in FP8 as the rollout engine's stands in for the engine: where learner and
engine round alike (`precision.parity`), it computes the engine's very bits. So the mismatch of any
choice of linears in FP8 is that of the same learner with two plans, on the same tokens.

Each unit is measured twice. Alone: FP8 on it and nothing else. Left out: FP8 on all but it; the fall of
the mismatch is what keeping it in BF16 buys. The two need not agree, because what is computed in BF16
is chaotic: one rounding that falls otherwise anywhere grows, within a few layers, to a difference of
the size of all roundings. That is the floor under every figure of a unit alone, and a noise in every
other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fp8rl import progress
from fp8rl.layerwise.units import Unit, Units
from fp8rl.learner.batch import Batch
from fp8rl.learner.learner import Learner
from fp8rl.mismatch import k3, mismatch_panel
from fp8rl.model.precision import Decision
from fp8rl.model.rounding import ENGINE, POINTS, Rounding
from fp8rl.validation import LEVEL, RESAMPLES

# After the first, a choice is made among so many of those that are best by themselves.
_TRIED = 6


@dataclass(frozen=True)
class Effect:
    """Mismatch of the BF16 learner with another policy. error: token_mult_prob_error. kl_k3: nats a
    token. sums: float64 [B], k3 over the tokens of each sequence; tokens: [B], how many."""

    error: float
    kl_k3: float
    sums: np.ndarray
    tokens: np.ndarray

    @staticmethod
    def of(g: Tensor, p: Tensor, batch: Batch, truncate: float) -> "Effect":
        """g: log-probs [B, T] of the other policy; p: of the BF16 learner."""
        panel = mismatch_panel(g, p, batch.mask, truncate=truncate)
        sums = torch.where(batch.mask, k3(p.double() - g.double()), 0.0).sum(1)
        error, kl = panel["token_mult_prob_error"], panel["kl_k3"]
        return Effect(error, kl, sums.numpy(), batch.mask.sum(1).numpy())

    @cached_property
    def plain(self) -> dict[str, float]:
        return {"token_mult_prob_error": self.error, "kl_k3": self.kl_k3}


@dataclass(frozen=True)
class Fall:
    """By how much kl_k3 falls, with its 95% interval by bootstrap over sequences."""

    value: float
    low: float
    high: float

    @staticmethod
    def between(before: Effect, after: Effect, seed: int = 0) -> "Fall":
        """Of two effects on the same tokens; paired, so that what the sequences share drops out."""
        count = len(before.tokens)
        rows = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
        falls = (before.sums - after.sums)[rows].sum(1) / before.tokens[rows].sum(1)
        low, high = np.quantile(falls, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
        return Fall(before.kl_k3 - after.kl_k3, float(low), float(high))

    def is_beyond(self, noise: float) -> bool:
        """Whether it is more than chance: of the sequences, and of the roundings."""
        return self.low > 0 and self.value > noise


class Measure:
    """Effects of FP8 on some linears, of the weights that `learner` (BF16) holds, on the tokens of
    `batch`, at temperature 1."""

    def __init__(self, learner: Learner, batch: Batch) -> None:
        self.learner, self.batch = learner, batch
        self.reference = self.logprobs(learner.plan)

    def logprobs(self, plan: Mapping[str, Decision], rounding: Rounding = ENGINE) -> Tensor:
        """[B, T] of the learner with its linears in the formats of `plan`, which is not kept."""
        model = self.learner.model
        version = self.learner.version
        assert version is not None
        model.set_formats(plan)
        model.set_rounding(rounding)
        try:
            return self.learner.logprobs(self.batch, version=version, temperature=1.0)
        finally:
            model.set_formats(self.learner.plan)
            model.set_rounding(ENGINE)

    def effect(self, g: Tensor) -> Effect:
        """Of a policy with log-probs g [B, T]."""
        truncate = self.learner.recipe.correction.truncate
        return Effect.of(g, self.reference, self.batch, truncate)

    def __call__(self, plan: Mapping[str, Decision], rounding: Rounding = ENGINE) -> Effect:
        return self.effect(self.logprobs(plan, rounding))


@dataclass(frozen=True)
class Row:
    """alone: FP8 on the unit only. left_out: on all but it; fall: from FP8 on all."""

    unit: Unit
    alone: Effect
    left_out: Effect
    fall: Fall


@dataclass(frozen=True)
class Step:
    """The unit that was added to those kept in BF16, and the effect with all of these kept.

    fall: since the last step that was taken, or since FP8 on all. taken: whether it is beyond noise.
    """

    unit: Unit
    effect: Effect
    fall: Fall
    taken: bool


@dataclass(frozen=True)
class Attribution:
    """all_fp8: FP8 as the recipe has it. floors: BF16 against BF16 with one other rounding, by point.
    shaken: `all_fp8` with one other rounding, by point. rows: by `fall`, the greatest first.
    """

    units: Units
    all_fp8: Effect
    floors: Mapping[str, Effect]
    shaken: Mapping[str, Effect]
    rows: Sequence[Row]
    steps: Sequence[Step]

    @property
    def floor(self) -> float:
        """kl_k3: the mean of the floors."""
        return float(np.mean([effect.kl_k3 for effect in self.floors.values()]))

    @property
    def noise(self) -> float:
        """By how much another rounding alone changes the kl_k3 of FP8 on all, at most."""
        return noise_of(self.all_fp8, self.shaken.values())

    @property
    def suggestion(self) -> list[Unit]:
        """The units to keep in BF16, up to the last step that was taken; empty where none was."""
        last = max((n for n, step in enumerate(self.steps) if step.taken), default=-1)
        return [step.unit for step in self.steps[: last + 1]]


def noise_of(all_fp8: Effect, shaken: Iterable[Effect]) -> float:
    return max(abs(effect.kl_k3 - all_fp8.kl_k3) for effect in shaken)


def choose(
    units: Units,
    left_out: Mapping[Unit, Effect],
    measure: Callable[[Mapping[str, Decision]], Effect],
    all_fp8: Effect,
    *,
    noise: float,
    most: int,
    budget: float,
) -> list[Step]:
    """Adds the unit that lowers kl_k3 most to those kept in BF16, again and again: up to `most` units
    and `budget`, a share of the FP8 elements. A step is taken where kl_k3 fell beyond `noise` since the
    last that was.
    """
    ranked = sorted(left_out, key=lambda unit: left_out[unit].kl_k3)
    kept: list[Unit] = []
    steps: list[Step] = []
    taken = all_fp8
    while len(kept) < most:
        fitting = [u for u in ranked if u not in kept and units.share([*kept, u]) <= budget]
        if not fitting:
            break
        tried: dict[Unit, Effect] = {}
        if not kept:
            tried[fitting[0]] = left_out[fitting[0]]
        for n, unit in enumerate(fitting[:_TRIED] if kept else ()):
            _tell(f"choice {len(kept) + 1}: {unit.name}", n, len(fitting[:_TRIED]))
            tried[unit] = measure(units.kept([*kept, unit]))
        best = min(tried, key=lambda unit: tried[unit].kl_k3)
        kept.append(best)
        fall = Fall.between(taken, tried[best])
        steps.append(Step(best, tried[best], fall, fall.is_beyond(noise)))
        if steps[-1].taken:
            taken = tried[best]
    return steps


def attribute(units: Units, measure: Measure, *, most: int, budget: float) -> Attribution:
    """Measures every unit alone and left out, and chooses; most, budget: see `choose`."""
    total, done = 1 + 2 * len(POINTS) + 2 * len(units.units), 0

    def told(text: str, plan: Mapping[str, Decision], rounding: Rounding = ENGINE) -> Effect:
        nonlocal done
        _tell(text, done, total)
        done += 1
        return measure(plan, rounding)

    all_fp8 = told("FP8 on all", units.plan)
    others = {point: ENGINE.but(**{point: False}) for point in POINTS}
    shaken = {p: told(f"FP8, other {p}", units.plan, other) for p, other in others.items()}
    # Left out first: neighbours differ by one unit, and what is quantised already stays.
    left_out = {u: told(f"left out: {u.name}", units.kept([u])) for u in units.units}
    floors = {p: told(f"BF16, other {p}", units.alone(None), other) for p, other in others.items()}
    alone = {u: told(f"alone: {u.name}", units.alone(u)) for u in units.units}
    rows = [Row(u, alone[u], left_out[u], Fall.between(all_fp8, left_out[u])) for u in units.units]
    noise = noise_of(all_fp8, shaken.values())
    steps = choose(units, left_out, measure, all_fp8, noise=noise, most=most, budget=budget)
    rows.sort(key=lambda row: row.fall.value, reverse=True)
    return Attribution(units, all_fp8, floors, shaken, rows, steps)


def _tell(text: str, done: int, total: int) -> None:
    progress.emit(progress.Event("phase", text, done=done, total=total))
