"""The runs folder: making a run, opening it again, and what state each run is in.

    runs/<run>/run.json             identity: id, resolved recipe, parent of a fork, machine
    runs/<run>/recipe.yaml          the resolved recipe for people to read
    runs/<run>/attempts/00001.json  one file for each process that worked on the run, and how it ended

A run's folder is built beside and renamed, so it is there whole or not at all.
"""

import os
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8rl.files import from_sealed, fsync_folder, fsync_tree, to_sealed, write_atomic
from fp8rl.identity import COPY, IDENTITY, IdentityError, read_identity, write_identity
from fp8rl.journal import ITERATION, Journal, JournalError
from fp8rl.lock import RunLock, may_be_writing, read_owner
from fp8rl.recipe.load import load_recipe, to_yaml
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Recipe


class RunExistsError(RuntimeError):
    """A run of that name is there already."""


class NoRunError(RuntimeError):
    """There is no run of that name, or it is not whole."""


@dataclass(frozen=True)
class State:
    """state: running, finished, failed, cancelled, stopped (in good order, to be resumed), killed,
    or new. reason: why it is not running, in words.
    """

    state: str
    reason: str = ""

    @property
    def is_over(self) -> bool:
        """Whether no process works on it."""
        return self.state != "running"


class Run:
    """A run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = Journal(folder)

    @property
    def name(self) -> str:
        return self.folder.name

    @staticmethod
    def create(
        runs: Path, name: str, recipe: Recipe, about: dict[str, Any], fill: Path | None = None
    ) -> tuple["Run", RunLock]:
        """Makes a new run of the settled `recipe` and takes its lock.

        about: what else run.json says. fill: a folder whose content the run starts with (of a fork);
        it is used up. Raises RunExistsError, saying what is there, where the name is taken: two runs
        are never mixed and none is overwritten.
        """
        folder = runs / name
        runs.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            raise RunExistsError(Run(folder).describe())
        building = fill or building_folder(runs, name)
        lock = None
        try:
            building.mkdir(exist_ok=True)
            identity = {"name": name, "id": uuid.uuid4().hex, "origin": 0, **about}
            _write_recipe(building, identity, recipe)
            lock = RunLock(building)
            fsync_tree(building)
            lock.folder = folder
            building.rename(folder)
        except BaseException as error:
            if lock is not None:
                lock.folder = building
                lock.release()
            shutil.rmtree(building, ignore_errors=True)
            if isinstance(error, OSError) and folder.exists():  # another process was faster
                raise RunExistsError(Run(folder).describe()) from None
            raise
        fsync_folder(runs)
        return Run(folder), lock

    @staticmethod
    def find(runs: Path, name: str) -> "Run":
        """The run called `name`; raises NoRunError with the nearest names where there is none."""
        folder = runs / name
        if any((folder / file).is_file() for file in (IDENTITY, COPY)):
            return Run(folder)
        import difflib

        known = [run.name for run in all_runs(runs)]
        near = difflib.get_close_matches(name, known, n=3)
        hint = (
            f"; did you mean {' or '.join(near)}?" if near else "; `fp8rl runs` lists those there are"
        )
        if folder.is_dir():
            hint = f": {folder} has no run.json, so it is not a run"
        raise NoRunError(f"no run {name!r} in {runs}{hint}")

    @property
    def about(self) -> dict[str, Any]:
        """run.json; raises IdentityError where it and its copy are damaged."""
        return read_identity(self.folder)

    @property
    def id(self) -> str:
        return str(self.about["id"])

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe, with this runs folder."""
        recipe = Recipe.model_validate(self.about["recipe"])
        return recipe.model_copy(update={"runs_dir": str(self.folder.parent), "name": self.name})

    def change_recipe(self, recipe: Recipe) -> None:
        """Replaces the recipe; whether that may be is the caller's to know."""
        _write_recipe(self.folder, self.about, recipe)

    @property
    def recipe_file(self) -> Path:
        return self.folder / "recipe.yaml"

    def is_recipe_file_whole(self) -> bool:
        """Whether recipe.yaml still says what run.json does."""
        try:
            return load_recipe(self.recipe_file).recipe == Recipe.model_validate(self.about["recipe"])
        except RecipeError:
            return False

    def restore_recipe_file(self) -> str | None:
        """Writes recipe.yaml again where it is not whole; says so. None where there was no need."""
        if self.is_recipe_file_whole():
            return None
        recipe = Recipe.model_validate(self.about["recipe"])
        write_atomic(self.recipe_file, to_yaml(recipe).encode())
        return f"{self.recipe_file} was missing, damaged or edited; written again from {IDENTITY}"

    @property
    def origin(self) -> int:
        """The weight version that the run starts from: 0, or that of a fork's checkpoint."""
        return int(self.about["origin"])

    # Attempts.

    def attempts(self) -> list[dict[str, Any]]:
        """What each process that worked on the run said of itself, in order; damaged ones left out."""
        read = ((path, _read_attempt(path)) for path in self._attempt_files())
        return [{"number": int(path.stem), **values} for path, values in read if values is not None]

    def damaged_attempts(self) -> list[Path]:
        """Files of attempts that are not as they were written. Nothing depends on them."""
        return [path for path in self._attempt_files() if _read_attempt(path) is None]

    def _attempt_files(self) -> list[Path]:
        return sorted(p for p in self.folder.glob("attempts/*.json") if p.stem.isdecimal())

    def begin_attempt(self, about: dict[str, Any]) -> int:
        """Records that this process works on the run; returns the attempt's number."""
        number = max([0, *(int(path.stem) for path in self._attempt_files())]) + 1
        self._write_attempt(number, {"state": "running", **about})
        return number

    def update_attempt(self, number: int, **values: Any) -> None:
        """Adds `values` to what is known of an attempt; one that was damaged since stays so."""
        known = next((a for a in self.attempts() if a["number"] == number), None)
        if known is not None:
            del known["number"]
            self._write_attempt(number, known | values)

    def end_attempt(self, number: int, state: State) -> None:
        """Records how an attempt ended."""
        self.update_attempt(number, state=state.state, reason=state.reason, ended=time.time())

    def end_killed_attempts(self) -> list[dict[str, Any]]:
        """Records the attempts that ended without a word as killed, and returns them; for who holds the
        run's lock, since then nobody else works on it.
        """
        killed = [attempt for attempt in self.attempts() if attempt.get("state") == "running"]
        for attempt in killed:
            self.end_attempt(attempt["number"], _killed(attempt))
        return killed

    def _write_attempt(self, number: int, values: dict[str, Any]) -> None:
        write_atomic(self.folder / "attempts" / f"{number:05d}.json", to_sealed(values))

    # What state it is in.

    def state(self) -> State:
        """The run's state now. A process that is gone without a word was killed."""
        owner = read_owner(self.folder)
        attempts = self.attempts()
        last = attempts[-1] if attempts else None
        damaged = self.damaged_attempts()
        if owner is not None and owner.is_alive():
            return State("running", str(owner))
        if damaged and (last is None or int(damaged[-1].stem) > last["number"]):
            return State("killed", f"{damaged[-1]} is damaged, which would say how it ended")
        if last is None:
            return State("new", "it was created, and no step of it began")
        if last["state"] == "running":
            return _killed(last)
        return State(last["state"], last.get("reason", ""))

    def is_dead_without_a_word(self) -> bool:
        """Whether its last process was killed and nobody has put the records right yet."""
        attempts = self.attempts()
        return bool(attempts) and attempts[-1]["state"] == "running" and self.state().is_over

    def last_step(self) -> str:
        """The last committed step, in words."""
        records = []
        for iteration, step in self.journal.steps():
            try:
                records.append(self.journal.record(iteration, step))
            except JournalError:
                continue
        if not records:
            return "none"
        last = max(
            records, key=lambda record: (record.iteration, record.step == ITERATION, record.t_ms)
        )
        if last.step == ITERATION:
            return f"iteration {last.iteration} is complete"
        return f"{last.step} of iteration {last.iteration}"

    def resume_command(self) -> str:
        """What the user types to carry on; empty where there is nothing to carry on."""
        if self.state().state in ("running", "finished"):
            return ""
        # The stop that it came to would stop it again at once.
        last = self.recipe.stop.after_iteration
        reached = last is not None and self.journal.is_committed(last, ITERATION)
        return f"fp8rl resume {self.name}" + (" stop.after_iteration=null" if reached else "")

    def describe(self) -> str:
        """What is in the folder of a name that is taken, and what the user can do."""
        lines = [f"a run named {self.name!r} exists in {self.folder.parent}:"]
        try:
            started, digest = self.about["started"], self.about["recipe_digest"][:12]
            state = self.state()
            said = f" ({state.reason})" if state.reason else ""
            lines.append(f"  started {started}, recipe {digest}")
            lines.append(f"  last committed step: {self.last_step()}")
            lines.append(f"  state: {state.state}{said}")
            command = self.resume_command()
        except (IdentityError, KeyError):
            lines.append("  it has no whole run.json: it is not a run, or it lost that file")
            command = ""
        lines.append("Nothing was changed. Start under another name (name=...)")
        if command:
            lines[-1] += f", or carry on with `{command}`"
        return "\n".join(lines) + "."


def _killed(attempt: dict[str, Any]) -> State:
    where = f"process {attempt.get('pid')} on {attempt.get('host')}"
    return State("killed", f"{where} is gone without a word")


def _read_attempt(path: Path) -> dict[str, Any] | None:
    try:
        return from_sealed(path.read_bytes())
    except (OSError, ValueError):
        return None


def building_folder(runs: Path, name: str) -> Path:
    """An empty place where this process builds the folder of a new run."""
    folder = runs / f".{name}.{os.getpid()}.new"
    shutil.rmtree(folder, ignore_errors=True)  # of a process that had this one's number
    return folder


def _write_recipe(folder: Path, identity: dict[str, Any], recipe: Recipe) -> None:
    values = identity | {
        "recipe": recipe.model_dump(mode="json"),
        "recipe_digest": recipe.digest(),
        "step_digest": recipe.step_digest(),
    }
    write_identity(folder, values)
    write_atomic(folder / "recipe.yaml", to_yaml(recipe).encode())


def all_runs(runs: Path) -> list[Run]:
    """Every run in the runs folder, the oldest first; those that have lost run.json too."""
    files = [path for name in (IDENTITY, COPY) for path in runs.glob(f"[!.]*/{name}")]
    return [Run(folder) for folder in sorted({path.parent for path in files}, key=_age)]


def _age(folder: Path) -> tuple[str, str]:
    try:
        return str(read_identity(folder).get("started", "")), folder.name
    except IdentityError:
        return "", folder.name


def run_of_flow(runs: Path, flow_run_id: str) -> Run | None:
    """The run that a Prefect flow run has worked on, so that its retry goes on with the same."""
    for run in all_runs(runs):
        if any(attempt.get("prefect_flow_run") == flow_run_id for attempt in run.attempts()):
            return run
        try:  # it may have been killed between making the run and beginning to work on it
            if run.about.get("prefect_flow_run") == flow_run_id:
                return run
        except IdentityError:
            continue
    return None


def remove_unborn(runs: Path) -> None:
    """Deletes what processes that died while making a run left of it."""
    for folder in runs.glob(".*.new"):
        pid = folder.name.split(".")[-2]
        if pid.isdigit() and not may_be_writing(int(pid), folder):
            shutil.rmtree(folder, ignore_errors=True)
