"""The sweep: which recipes are trained with which values, how many of them, and what ends it early.

A sweep file is YAML like a recipe. Its children are ordinary training runs: every arm, with every seed,
with every set of values. `docs/sweeps.md` says how it runs.
"""

import math
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, field_validator

from fp8rl.recipe.base import NonNegativeInt, PositiveFloat, PositiveInt, Section
from fp8rl.recipe.load import by_recipe_key, unknown_recipe_keys


class Method(StrEnum):
    GRID = "grid"  # every combination of the values of `axes`
    LIST = "list"  # the combinations of `combinations`, and no other
    OPTUNA = "optuna"  # an Optuna study chooses


class Kind(StrEnum):
    FLOAT = "float"
    INT = "int"
    LOG = "log"  # a float, even on a logarithmic scale
    CHOICE = "choice"


class Direction(StrEnum):
    MAXIMIZE = "maximize"
    MINIMIZE = "minimize"


class Space(Section):
    """Where Optuna may look for the value of one recipe key."""

    kind: Kind
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()

    def extremes(self) -> tuple[Any, ...]:
        """Values that stand for the others when recipes are checked."""
        if self.kind is Kind.CHOICE:
            return self.choices
        assert self.low is not None
        assert self.high is not None
        whole = self.kind is Kind.INT
        return (int(self.low), int(self.high)) if whole else (self.low, self.high)

    def problem(self) -> str | None:
        """What is wrong with it, in words."""
        if self.kind is Kind.CHOICE:
            if not self.choices or (self.low, self.high) != (None, None):
                return "a choice has choices, and neither low nor high"
            if not all(isinstance(c, str | int | float | bool) or c is None for c in self.choices):
                return "choices are numbers, words, true, false or null"
            return None
        if self.low is None or self.high is None or self.choices:
            return f"{self.kind} has low and high, and no choices"
        if self.low >= self.high:
            return f"low {self.low:g} is not below high {self.high:g}"
        if self.kind is Kind.LOG and self.low <= 0:
            return f"low {self.low:g}: a logarithmic scale begins above 0"
        if self.kind is Kind.INT and any(math.floor(v) != v for v in (self.low, self.high)):
            return "low and high of an int are whole numbers"
        return None


def _by_key(value: Any) -> Any:
    """Mappings from recipe keys, dotted or nested, as mappings from dotted ones."""
    if isinstance(value, list | tuple):
        return [_by_key(one) for one in value]
    return by_recipe_key(value) if isinstance(value, dict) else value


class Optuna(Section):
    """A study of one arm. A trial is a set of values; with several seeds it is worth their mean."""

    space: Annotated[dict[str, Space], Field(min_length=1)]
    """{recipe key: where to look}, for example {learner.lr: {kind: log, low: 1e-5, high: 1e-3}}."""
    trials: PositiveInt
    metric: str = "val/accuracy"
    """As MLflow shows it; the last value of a child counts."""
    direction: Direction = Direction.MAXIMIZE
    seed: NonNegativeInt = 0
    """Of the sampler (TPE)."""

    _keys = field_validator("space", mode="before")(_by_key)


class Budget(Section):
    """What all children together may use. One that does not fit is not begun: it is skipped."""

    iterations: PositiveInt | None = None
    """Iterations; a child is begun where all of its own still fit."""
    hours: PositiveFloat | None = None
    """Hours of the children's processes; a child is begun where some are left."""


class Failures(Section):
    """A child that fails does not end the sweep."""

    limit: PositiveInt | None = 3
    """So many that fail in one start of the sweep end it: no further child is begun. null: none do."""
    retry: bool = True
    """Carry failed children on when the sweep is started again."""


class Sweep(Section):
    name: str
    """Names of the children begin with it. {date} in it stands for the day, as 20260131."""
    arms: Annotated[tuple[str, ...], Field(min_length=1)]
    """Recipe files, beside this file."""
    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (0,)
    method: Method = Method.GRID
    axes: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = Field(default_factory=dict)
    """grid: {recipe key: values}."""
    combinations: tuple[dict[str, Any], ...] = ()
    """list: [{recipe key: value, ...}, ...]."""
    optuna: Optuna | None = None
    overrides: dict[str, Any] = Field(default_factory=dict)
    """{recipe key: value} for all children. {name} in tracking.experiment is the sweep's name."""
    stop_when: tuple[str, ...] = ()
    """Rules of the children's guard that stop a child when they fire: what a rule watches ("mismatch"),
    or its name ("mismatch > 1.05")."""
    budget: Budget = Budget()
    failures: Failures = Failures()
    parallel: PositiveInt = 1
    """Children at a time. A machine's devices are not shared: more than one is for several machines."""
    runs_dir: str = "runs"

    _keys = field_validator("axes", "overrides", "combinations", mode="before")(_by_key)

    def policy(self) -> dict[str, Any]:
        """What may be another at each start of the sweep: it changes no child."""
        return self.model_dump(mode="json", include=POLICY)

    def searched(self) -> tuple[str, ...]:
        """The recipe keys that differ from child to child, besides the arm's and the seed."""
        keys = [*self.axes, *(key for one in self.combinations for key in one)]
        keys += self.optuna.space if self.optuna else []
        return tuple(dict.fromkeys(keys))


POLICY = {"budget", "failures", "parallel"}
# What the sweep itself says of each child.
_OWN = {"name", "arm", "seed", "runs_dir", "tracking.tags"}
_KEYS_OF = {Method.GRID: "axes", Method.LIST: "combinations", Method.OPTUNA: "optuna"}


def sweep_problems(sweep: Sweep) -> Iterator[str]:
    """Everything that is wrong with a sweep by itself, in words."""
    for method, key in _KEYS_OF.items():
        given = bool(getattr(sweep, key))
        if given and method is not sweep.method:
            yield f"{key}: that is for method={method}, and this is method={sweep.method}"
        if not given and method is sweep.method and method is not Method.GRID:
            yield f"{key}: method={method} needs it"
    for where in ("arms", "seeds"):
        given = getattr(sweep, where)
        for one in sorted({str(v) for v in given if given.count(v) > 1}):
            yield f"{where}: {one} stands there twice"
    yield from _keys(sweep)
    for key, values in sweep.axes.items():
        twice = [v for i, v in enumerate(values) if v in values[:i]]
        if twice:
            yield f"axes.{key}: {twice[0]!r} stands there twice"
    if sweep.optuna is not None:
        if len(sweep.arms) > 1:
            yield (
                "arms: an Optuna study is of one arm, since the best values of one are not those of "
                "another. Make a sweep for each"
            )
        for key, space in sweep.optuna.space.items():
            if problem := space.problem():
                yield f"optuna.space.{key}: {problem}"


def _keys(sweep: Sweep) -> Iterator[str]:
    searched = sweep.searched()
    yield from unknown_recipe_keys([*searched, *sweep.overrides])
    for key in dict.fromkeys([*searched, *sweep.overrides]):
        if key in _OWN:
            yield f"{key}: the sweep says that for each child (name, arms, seeds, runs_dir)"
    for key in searched:
        if key in sweep.overrides:
            yield f"{key}: in overrides it is the same for all children; elsewhere it is not"
