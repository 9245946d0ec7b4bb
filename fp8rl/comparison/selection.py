"""Which runs are compared, and whether they may be: from the runs folder alone.

Runs are comparable where their recipes differ in precision, arm, seed, names and places only; other
differences are refused by name unless the caller accepts them.
"""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8rl.identity import IdentityError
from fp8rl.recipe.load import flatten
from fp8rl.recipe.schema import Recipe, changes_numbers
from fp8rl.runs import Run, all_runs

UNNAMED = "unnamed"
DEFAULT_MARGIN = 0.02
# What differs though no recipe key says it.
FORK, PROMPTS = "fork", "prompts"


class ComparisonError(ValueError):
    """What was asked for cannot be compared. The text names runs and keys, and what can be done."""


@dataclass(frozen=True)
class Selection:
    """The chosen runs, all of one experiment. notes: what was left out."""

    experiment: str
    runs: tuple[Run, ...]
    notes: tuple[str, ...] = ()


def arm_of(recipe: Recipe) -> str:
    """The name under which a run is compared."""
    return recipe.arm or UNNAMED


def select(
    runs_dir: Path,
    experiment: str | None = None,
    names: Iterable[str] = (),
    allowed: Iterable[str] = (),
) -> Selection:
    """The runs of `experiment` in `runs_dir`; None: of the only one there is.

    names: only these runs of it. allowed: recipe keys, or sections of them, that may differ. Raises
    ComparisonError where there is no such experiment or run, where two runs have the same arm and
    seed, and where recipes differ in more than they may; NoRunError for a name that is no run.
    """
    wanted, notes = list(dict.fromkeys(names)), []
    found: dict[str, list[Run]] = {}
    for run in [Run.find(runs_dir, name) for name in wanted] or all_runs(runs_dir):
        try:
            found.setdefault(run.recipe.tracking.experiment, []).append(run)
        except IdentityError as error:
            if wanted:
                raise
            notes.append(f"run {run.name} is damaged, and left out: {error}")
    experiment = _experiment(found, experiment, runs_dir)
    chosen = found.get(experiment, [])
    outside = [name for name in wanted if name not in {run.name for run in chosen}]
    if outside:
        raise ComparisonError(
            f"not of experiment {experiment!r}: {', '.join(outside)}. Of it: {_names(chosen) or 'none'}"
        )
    _require_one_each(chosen)
    _require_alike(chosen, tuple(allowed))
    return Selection(experiment, tuple(chosen), tuple(notes))


def _names(runs: Iterable[Run]) -> str:
    return ", ".join(run.name for run in runs)


def _experiment(found: dict[str, list[Run]], asked: str | None, runs_dir: Path) -> str:
    there = "; ".join(f"{name!r} ({len(runs)} runs)" for name, runs in found.items())
    if not found:
        raise ComparisonError(f"no runs in {runs_dir}: name another folder with --runs-dir")
    if asked is None:
        if len(found) > 1:
            raise ComparisonError(f"several experiments in {runs_dir}: {there}. Name one of them")
        return next(iter(found))
    if asked not in found:
        near = difflib.get_close_matches(asked, found, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ComparisonError(f"no experiment {asked!r} in {runs_dir}. There: {there}{hint}")
    return asked


def _require_one_each(runs: list[Run]) -> None:
    same: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        same.setdefault((arm_of(run.recipe), run.recipe.seed), []).append(run)
    lines = [
        f"  arm {arm!r}, seed {seed}: {_names(several)}"
        for (arm, seed), several in same.items()
        if len(several) > 1
    ]
    if lines:
        raise ComparisonError(
            "more than one run of the same arm and seed:\n"
            + "\n".join(lines)
            + "\nChoose one of each by name: --runs RUN,RUN,..."
        )


# Comparable recipes.


def values_of_recipe(recipe: Recipe) -> dict[str, str]:
    """What of a recipe can make its runs differ, but for the seed: by key, as text."""
    return {
        key: value
        for key, value in flatten(recipe).items()
        if (changes_numbers(key) or key == "iterations") and key != "seed"
    }


def _values(run: Run) -> dict[str, str]:
    origin = run.origin
    return values_of_recipe(run.recipe) | {FORK: f"at iteration {origin}" if origin else "none"}


def _is_precision(key: str) -> bool:
    return key.partition(".")[0] == "precision"


def is_allowed(key: str, allowed: tuple[str, ...]) -> bool:
    """Whether `key`, or a section that it is in, is among `allowed`."""
    return any(key == one or key.startswith(f"{one}.") for one in allowed)


def _require_alike(runs: list[Run], allowed: tuple[str, ...]) -> None:
    values = {run.name: _values(run) for run in runs}
    known = {key for of_run in values.values() for key in of_run} | {PROMPTS}
    for key in allowed:
        if not any(is_allowed(one, (key,)) for one in known):
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ComparisonError(f"--allow-different: no recipe has a key {key!r}{hint}")
    found = _differences(values, lambda key: not _is_precision(key))
    by_arm: dict[str, dict[str, Any]] = {}
    for run in runs:
        by_arm.setdefault(arm_of(run.recipe), {})[run.name] = values[run.name]
    for arm, of_arm in by_arm.items():
        within = _differences(of_arm, _is_precision)
        found |= {f"{key} (within arm {arm!r})": lines for key, lines in within.items()}
    found = {key: v for key, v in found.items() if not is_allowed(key.partition(" ")[0], allowed)}
    if found:
        lines = [f"  {key}: {text}" for key, text in sorted(found.items())]
        raise ComparisonError(
            "these runs are not comparable; they differ in more than precision, arm, seed and places:\n"
            + "\n".join(lines)
            + "\nLeave runs out (--runs RUN,RUN,...), or accept a difference with --allow-different KEY"
        )


def _differences(values: dict[str, dict[str, str]], asked: Callable[[str], bool]) -> dict[str, str]:
    """{key: which run has which value} of the keys in which runs differ."""
    keys = dict.fromkeys(key for of_run in values.values() for key in of_run if asked(key))
    found = {}
    for key in keys:
        runs_by_value: dict[str, list[str]] = {}
        for run, of_run in values.items():
            runs_by_value.setdefault(of_run.get(key, "nothing"), []).append(run)
        if len(runs_by_value) > 1:
            found[key] = "; ".join(
                f"{value} in {', '.join(names)}" for value, names in runs_by_value.items()
            )
    return found
