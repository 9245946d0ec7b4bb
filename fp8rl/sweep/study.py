"""Children whose values an Optuna study chooses.

A trial is a set of values; its children are the arm with each seed, and it is worth the mean of theirs.
The study is in a SQLite file of the sweep's folder. A trial counts from when the mark with its number
is in there, and its children's names follow from that number: so a start after a kill finds the
children of trials that are not told yet, and goes on with them. Each trial has a sampler of its own,
seeded with the study's seed and the trial's number: what it suggests depends on what the study was told
before, and on nothing else.
"""

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8rl.files import sha256
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.sweep import Kind, Optuna, Space
from fp8rl.sweep.drive import ListSource, Source
from fp8rl.sweep.expand import Child, LoadedSweep
from fp8rl.sweep.look import ChildState, metric_of
from fp8rl.sweep.plan import Plan

_NUMBER = "fp8rl.trial"
MISSING = (
    "method=optuna needs Optuna, which is not installed here: pip install optuna==5.0.0 (the extra "
    "`sweep`), or use method=grid"
)


def require_optuna() -> Any:
    """Optuna's module; raises RecipeError saying what to install where there is none."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise RecipeError(MISSING) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class StudySource:
    """A `drive.Source`. metric: {iteration: value} of a child's metric of that name."""

    def __init__(
        self, loaded: LoadedSweep, file: Path, metric: Callable[[Child, str], dict[int, float]]
    ) -> None:
        """Raises RecipeError where Optuna is not installed."""
        assert loaded.sweep.optuna is not None
        self._optuna = require_optuna()
        self._loaded, self._metric = loaded, metric
        self._config: Optuna = loaded.sweep.optuna
        self._study = self._optuna.create_study(
            storage=f"sqlite:///{file}",
            study_name=loaded.sweep.name,
            direction=str(self._config.direction),
            load_if_exists=True,
        )
        self._states: dict[str, ChildState] = {}
        self._made: dict[int, list[Child]] = {}
        self._pending: list[Child] | None = None
        self._closed = False

    def _forget_half_asked(self) -> None:
        """A process that is killed while it asks leaves a trial without a number."""
        for trial in self._study.get_trials(deepcopy=False):
            if not trial.state.is_finished() and _NUMBER not in trial.user_attrs:
                self._study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)

    def _trials(self) -> dict[int, Any]:
        """Optuna's trials by our number; of one that was told again, the last."""
        trials = self._study.get_trials(deepcopy=False)
        return {t.user_attrs[_NUMBER]: t for t in trials if _NUMBER in t.user_attrs}

    def _children(self, trial: Any) -> list[Child]:
        number, values = trial.user_attrs[_NUMBER], dict(trial.params)
        if number not in self._made:
            bases = self._loaded.children
            self._made[number] = [self._loaded.of_trial(base, values, number) for base in bases]
        return list(self._made[number])

    # As a source.

    def known(self) -> list[Child]:
        return [child for trial in self._trials().values() for child in self._children(trial)]

    def take(self) -> Child | None:
        if self._pending is None:
            self._forget_half_asked()
            # Of trials that are told, too: a failed child may have been carried on since, or is to be.
            self._pending = self.known()
        if not self._pending and not self._closed:
            number = len(self._trials())
            if number < self._config.trials:
                self._pending = self._ask(number)
        return self._pending.pop(0) if self._pending else None

    def skipped(self, child: Child) -> None:
        self._closed = True

    def left(self) -> int:
        return (self._config.trials - len(self._trials())) * len(self._loaded.children)

    def _ask(self, number: int) -> list[Child]:
        seed = int(sha256(f"{self._config.seed} {number}".encode())[:8], 16)
        self._study.sampler = self._optuna.samplers.TPESampler(seed=seed)
        space = {key: self._distribution(one) for key, one in self._config.space.items()}
        trial = self._study.ask(space)
        trial.set_user_attr(_NUMBER, number)  # from here on it counts
        return self._children(self._trials()[number])

    def _distribution(self, space: Space) -> Any:
        kinds = self._optuna.distributions
        if space.kind is Kind.CHOICE:
            return kinds.CategoricalDistribution(space.choices)
        low, high = space.extremes()
        if space.kind is Kind.INT:
            return kinds.IntDistribution(low, high)
        return kinds.FloatDistribution(low, high, log=space.kind is Kind.LOG)

    # What became of it.

    def over(self, child: Child, state: ChildState) -> None:
        self._states[child.name] = state
        assert child.trial is not None
        trial = self._trials()[child.trial]
        children = self._children(trial)
        states = [self._states.get(one.name) for one in children]
        if not all(one is not None and (one.settled or one.is_failed) for one in states):
            return
        ends = self._optuna.trial.TrialState
        found = {one.state for one in states if one is not None}
        if found == {"finished"}:
            self._tell(trial, ends.COMPLETE, children)
        elif found <= {"finished", "stopped"}:
            self._tell(trial, ends.PRUNED, children)
        else:
            self._tell(trial, ends.FAIL, children)

    def _tell(self, trial: Any, end: Any, children: list[Child]) -> None:
        """Tells the study how a trial ended. One that failed and was carried on since gets another
        entry: a study changes none that is finished."""
        points = [self._metric(child, self._config.metric) for child in children]
        both = sorted(set.intersection(*(set(one) for one in points)))
        curve = {step: statistics.fmean(one[step] for one in points) for step in both}
        ends = self._optuna.trial.TrialState
        last = [one[max(one)] for one in points if one]
        if end == ends.COMPLETE and not (all(points) and all(map(math.isfinite, last))):
            end = ends.FAIL  # they finished, and have no such metric, or none that is a number
        value = statistics.fmean(last) if end == ends.COMPLETE else None
        if trial.state == end:
            return
        if trial.state.is_finished():
            told = self._optuna.trial.create_trial(
                state=end,
                value=value,
                params=trial.params,
                distributions=trial.distributions,
                user_attrs=trial.user_attrs,
                intermediate_values=curve,
            )
            self._study.add_trial(told)
            return
        live = self._optuna.trial.Trial(self._study, trial._trial_id)
        for step, at in curve.items():
            live.report(at, step)
        self._study.tell(trial.number, value, state=end)

    def best(self) -> dict[str, Any] | None:
        """{"trial", "value", "values"} of the best trial; None where none is complete."""
        try:
            best = self._study.best_trial
        except ValueError:
            return None
        return {"trial": best.user_attrs[_NUMBER], "value": best.value, "values": best.params}


def source_of(plan: Plan) -> Source:
    """Where the sweep's children come from."""
    if plan.loaded.sweep.optuna is None:
        return ListSource(plan.loaded.children)
    file = plan.folder / "study.db"
    return StudySource(plan.loaded, file, lambda child, name: metric_of(plan, child, name))
