"""From a sweep file to its children: names, values and validated recipes."""

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from fp8rl.files import values_digest
from fp8rl.model.dims import UnsupportedModelError
from fp8rl.recipe.guard import Action, GuardRule
from fp8rl.recipe.load import check_name, load_recipe, read_values, validated, with_overrides
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Recipe
from fp8rl.recipe.sweep import Method, Sweep, sweep_problems

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST = 100  # of a run's name
_EXPERIMENT = "tracking.experiment"


@dataclass(frozen=True)
class Child:
    """A training run of a sweep. values: by recipe key, what tells it from the others besides arm and
    seed. trial: its number in an Optuna study."""

    name: str
    arm: str
    seed: int
    values: dict[str, Any]
    recipe: Recipe
    trial: int | None = None

    @property
    def what(self) -> str:
        """Its values in words."""
        return ", ".join(f"{key}={_text(value)}" for key, value in self.values.items())


@dataclass(frozen=True)
class LoadedSweep:
    """A sweep, its file and its children. Of an Optuna study these are the arm as it is, with each
    seed: the children of its trials are made from them as it goes on."""

    sweep: Sweep
    path: Path
    children: tuple[Child, ...]

    def of_trial(self, base: Child, values: dict[str, Any], trial: int) -> Child:
        """The child `base` with the values of a trial; raises RecipeError."""
        recipe = with_overrides(base.recipe, _as_overrides(values))
        name = f"{base.name}-t{trial:04d}"
        return Child(name, base.arm, base.seed, values, _called(recipe, name), trial)

    @property
    def count(self) -> int:
        """Children that it has when all are begun."""
        return len(self.children) * self._trials

    @property
    def iterations(self) -> int:
        """Of all its children together."""
        return sum(child.recipe.iterations for child in self.children) * self._trials

    @property
    def _trials(self) -> int:
        return self.sweep.optuna.trials if self.sweep.optuna else 1


def load_sweep(
    path: Path, overrides: list[str] | None = None, today: date | None = None
) -> LoadedSweep:
    """Reads a sweep file, applies `overrides` ("seeds=[0]") and makes all its children's recipes.

    today: for {date} in the name. Raises RecipeError with all that is wrong, by child; whether the
    recipes can run on this machine is for `require_children_runnable` to ask.
    """
    values, origins = read_values(path, overrides or [])
    sweep = validated(values, Sweep, origins, path)
    name = sweep.name.replace("{date}", f"{today or date.today():%Y%m%d}")
    check_name(name)
    sweep = sweep.model_copy(update={"name": name, "overrides": _named_experiment(sweep, name)})
    if problems := list(sweep_problems(sweep)):
        raise RecipeError(f"{path}: " + "\n".join(problems))
    children, faults = [], []
    for arm, seed, one in itertools.product(sweep.arms, sweep.seeds, _combinations(sweep)):
        try:
            recipe = _recipe(sweep, path, arm, seed, one)
        except RecipeError as error:
            faults.append((_name(sweep, Path(arm).stem, seed, one), str(error)))
        else:
            children.append(Child("", str(recipe.arm), seed, one, recipe))
    _refuse(path, faults)
    loaded = LoadedSweep(sweep, path, tuple(_named(sweep, children)))
    _refuse(path, _alike(loaded.children))
    return loaded


def _named_experiment(sweep: Sweep, name: str) -> dict[str, Any]:
    """The overrides, with the sweep's name in that of the experiment: a night's runs are compared with
    each other, and not with those of the nights before."""
    experiment = sweep.overrides.get(_EXPERIMENT)
    if not isinstance(experiment, str):
        return sweep.overrides
    return {**sweep.overrides, _EXPERIMENT: experiment.replace("{name}", name)}


def require_children_runnable(
    loaded: LoadedSweep, require: Callable[[Recipe], None], children: Iterable[Child] | None = None
) -> None:
    """Asks `require` (fp8rl.preflight.require_runnable) of each child, of an Optuna study with the
    ends of every search space; raises RecipeError with all that is wrong, by child."""
    faults = []
    for child in _to_check(loaded) if children is None else children:
        try:
            require(child.recipe)
        except (RecipeError, UnsupportedModelError) as error:
            said = f" ({child.what})" if child.trial is not None else ""
            faults.append((f"{child.name}{said}", str(error)))
    _refuse(loaded.path, faults)


def _refuse(path: Path, faults: Iterable[tuple[str, str]]) -> None:
    """Raises RecipeError where there are `faults`, (child, message): those that several share, once."""
    by_message: dict[str, list[str]] = {}
    for name, message in faults:
        by_message.setdefault(message, []).append(name)
    if by_message:
        lines = [f"{', '.join(names)}: {message}" for message, names in by_message.items()]
        raise RecipeError(f"{path}: nothing was started.\n" + "\n".join(lines))


def _to_check(loaded: LoadedSweep) -> Iterator[Child]:
    study = loaded.sweep.optuna
    if study is None:
        yield from loaded.children
        return
    first = {key: space.extremes()[0] for key, space in study.space.items()}
    more = [{**first, key: v} for key, s in study.space.items() for v in s.extremes()[1:]]
    for base, values in itertools.product(loaded.children, [first, *more]):
        yield loaded.of_trial(base, values, 0)


def _combinations(sweep: Sweep) -> list[dict[str, Any]]:
    if sweep.method is Method.LIST:
        return list(sweep.combinations)
    keys = list(sweep.axes)
    return [dict(zip(keys, one, strict=True)) for one in itertools.product(*sweep.axes.values())]


def _recipe(sweep: Sweep, path: Path, arm: str, seed: int, values: dict[str, Any]) -> Recipe:
    given = {**sweep.overrides, **values, "seed": seed, "runs_dir": sweep.runs_dir}
    file = os.path.normpath(path.parent / arm)
    recipe = load_recipe(file, _as_overrides(given), said_by=str(path)).recipe
    return _stopped_by(recipe, sweep.stop_when) if sweep.stop_when else recipe


def _as_overrides(values: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _stopped_by(recipe: Recipe, rules: tuple[str, ...]) -> Recipe:
    """The recipe with a guard whose `rules` stop the run besides what they do anyhow."""

    def stopping(rule: GuardRule) -> GuardRule:
        if not {rule.watch.value, rule.name} & set(rules) or Action.STOP in rule.actions:
            return rule
        return rule.model_copy(update={"actions": (*rule.actions, Action.STOP)})

    known = {name for rule in recipe.guard.rules for name in (rule.watch.value, rule.name)}
    if unknown := [rule for rule in rules if rule not in known]:
        names = ", ".join(rule.name for rule in recipe.guard.rules) or "none"
        raise RecipeError(f"stop_when: the guard has no rule {unknown[0]!r}; its rules: {names}")
    guard = recipe.guard.model_copy(update={"rules": tuple(map(stopping, recipe.guard.rules))})
    return recipe.model_copy(update={"guard": guard})


# Names.


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _called(recipe: Recipe, name: str) -> Recipe:
    check_name(name)
    return recipe.model_copy(update={"name": name})


def _named(sweep: Sweep, children: list[Child]) -> list[Child]:
    """The children with names: sweep, arm, seed and values; a digest where the values cannot stand in
    one, or would not tell two children apart."""
    plain = [_name(sweep, child.arm, child.seed, child.values) for child in children]
    counts = Counter(plain)
    named = []
    for child, name in zip(children, plain, strict=True):
        if child.values and (len(name) > _LONGEST or counts[name] > 1):
            digest = values_digest(child.values)[:8]
            name = f"{_name(sweep, child.arm, child.seed, {})}-{digest}"
        named.append(replace(child, name=name, recipe=_called(child.recipe, name)))
    return named


def _name(sweep: Sweep, arm: str, seed: int, values: dict[str, Any]) -> str:
    short = _short_keys(sweep.searched())
    parts = [arm, f"s{seed}", *(f"{short[key]}{_text(value)}" for key, value in values.items())]
    return "-".join([sweep.name, *(_UNSAFE.sub("_", part) for part in parts)])


def _short_keys(keys: tuple[str, ...]) -> dict[str, str]:
    """The last word of each key, the whole one where two end alike."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: key if last.count(word) > 1 else word for key, word in zip(keys, last, strict=True)}


def _alike(children: tuple[Child, ...]) -> Iterator[tuple[str, str]]:
    """Children that are the same, by name or by recipe."""
    by_name: dict[str, Child] = {}
    by_recipe: dict[str, Child] = {}
    for child in children:
        digest = values_digest(child.recipe.model_dump(mode="json", exclude={"name", "arm"}))
        if other := by_recipe.get(digest):
            yield child.name, f"the same recipe as {other.name}. Leave one of them out"
        elif child.name in by_name:
            yield child.name, "two children of this name. Give the arms' recipes an `arm:` each"
        by_name[child.name] = child
        by_recipe[digest] = child
