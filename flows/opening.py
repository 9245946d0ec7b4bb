"""Opening the run that a `train` flow works on: a new one, or one to carry on with."""

import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fp8rl import machine
from fp8rl.context import RunContext
from fp8rl.data.fingerprint import require_unchanged
from fp8rl.device import compute_environment, resolve, settled
from fp8rl.lock import LockedError, Owner, RunLock
from fp8rl.model.source import describe_model, model_folder, pinned
from fp8rl.position import Position, settle
from fp8rl.preflight import require_runnable
from fp8rl.recipe.load import check_name
from fp8rl.recipe.schema import Recipe
from fp8rl.runs import Run, remove_unborn, run_of_flow

_PATIENCE_S = 30.0


@dataclass
class Opened:
    """A run that this process holds the lock of. resumed: it was there before. notes: what was found
    damaged, and what was done about it. killed: Prefect flow runs that worked on it and were killed.
    """

    run: Run
    lock: RunLock
    attempt: int
    recipe: Recipe
    position: Position
    notes: list[str]
    resumed: bool
    flow_run_id: str
    killed: list[str]

    def _earlier(self) -> list[dict[str, Any]]:
        """Earlier attempts of the same Prefect flow run."""
        attempts = [a for a in self.run.attempts() if a["number"] < self.attempt]
        return [a for a in attempts if a.get("prefect_flow_run") == self.flow_run_id]

    @property
    def is_retry(self) -> bool:
        """Whether Prefect runs the same flow run again."""
        return bool(self._earlier())

    def was_asked(self, iteration: int) -> bool:
        """Whether an earlier attempt ended, or was ended, at the guard's word on `iteration`."""
        earlier = (a for a in self.run.attempts() if a["number"] < self.attempt)
        return any(a.get("guard_asked") == iteration for a in earlier)

    def first_iteration(self) -> int:
        """The iteration that this flow run begins with: the first open one, and in a retry the one that
        the flow run began with, since its subflows are called in the same order again.
        """
        first = min(
            [
                self.position.iteration,
                *(a.get("first_iteration", self.position.iteration) for a in self._earlier()),
            ]
        )
        self.run.update_attempt(self.attempt, first_iteration=first)
        return first

    def context(self) -> RunContext:
        folder = self.run.folder
        return RunContext(
            run=self.run.name,
            folder=folder,
            model_dir=model_folder(self.recipe) or folder / "model",
            recipe=self.recipe,
            origin=self.run.origin,
        )


def run_name(recipe: Recipe) -> str:
    """The recipe's name for the run, or one made of date and arm."""
    return recipe.name or f"{datetime.now():%Y%m%d-%H%M%S}-{recipe.arm or 'run'}"


def open_run(recipe: Recipe, resume: str | None, flow_run_id: str) -> Opened:
    """The run that the Prefect flow run `flow_run_id` works on, locked.

    resume: name of a run to carry on with, by its own recipe. Without it, a flow run that is retried
    goes on with the run that it began, and any other begins a new one.
    Raises RecipeError, RunExistsError, NoRunError, LockedError or JournalError before any engine
    starts; then nothing was changed.
    """
    runs = Path(recipe.runs_dir).resolve()
    remove_unborn(runs)
    found = Run.find(runs, resume) if resume else run_of_flow(runs, flow_run_id)
    notes: list[str] = []
    if found is None:
        require_runnable(recipe)
        recipe = pinned(settled(recipe))
        name = run_name(recipe)
        check_name(name)
        about = identity(recipe) | {"prefect_flow_run": flow_run_id}
        run, lock = Run.create(runs, name, recipe, about)
        recipe = run.recipe
    else:
        run, lock = found, _lock(found, patient=resume is None)
    try:
        if found is not None:
            recipe = run.recipe
            # What is damaged is prepared again.
            is_prepared = run.journal.fault(run.origin, "prepare_data") is None
            require_runnable(recipe, is_prepared=is_prepared)
            if is_prepared:
                notes += _sources(run)
            notes += _differences(run)
        position, damage = settle(run)
        killed = [str(a.get("prefect_flow_run")) for a in run.end_killed_attempts()]
        attempt = run.begin_attempt(this_attempt(recipe, flow_run_id))
    except BaseException:
        lock.release()
        raise
    notes += damage
    killed = [one for one in killed if one != flow_run_id]  # a retry is the same flow run
    return Opened(run, lock, attempt, recipe, position, notes, found is not None, flow_run_id, killed)


def _sources(run: Run) -> list[str]:
    """Notes on local files that the run's prompts come from; raises RecipeError where one changed."""
    recorded = run.journal.record(run.origin, "prepare_data").inputs.get("files", {})
    return require_unchanged(run.recipe.task, recorded, run.name)


def _lock(run: Run, *, patient: bool) -> RunLock:
    """The run's lock. patient: a retry may come while the one before it still ends, or a worker puts
    its records right.
    """
    until = time.monotonic() + (_PATIENCE_S if patient else 0.0)
    while True:
        try:
            return RunLock(run.folder)
        except LockedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def identity(recipe: Recipe) -> dict[str, Any]:
    """What a new run's run.json says besides the recipe."""
    return {
        "arm": recipe.arm,
        "model": describe_model(recipe),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def this_attempt(recipe: Recipe, flow_run_id: str) -> dict[str, Any]:
    """What this process is: all that can change the bits of what it computes."""
    owner = Owner.this_process()
    return {
        "host": owner.host,
        "pid": owner.pid,
        "started": time.time(),
        "prefect_flow_run": flow_run_id,
        "machine": machine.describe(),
        "backends": {key: str(value) for key, value in vars(resolve(recipe)).items()},
        "environment": compute_environment(recipe),
    }


def _differences(run: Run) -> list[str]:
    """What differs from the machine of the last attempt, where bits may depend on it."""
    attempts = run.attempts()
    if not attempts:
        return []
    before, now = attempts[-1]["machine"], machine.describe()
    found = []
    for what in ("cpu", "python"):
        if before[what] != now[what]:
            found.append(f"{what} was {before[what]}, is {now[what]}")
    for package in sorted({*before["packages"], *now["packages"]}):
        old, new = before["packages"].get(package), now["packages"].get(package)
        if old != new:
            found.append(f"{package} was {old}, is {new}")
    warning = "so the bits of what is computed may differ; replay checks the weights it comes to"
    return [f"since the last attempt {', '.join(found)}: {warning}"] if found else []
