"""The plan of a sweep: what its children are, committed once and never changed.

    runs/sweeps/<sweep>/sweep.json    the plan: id, definition, every child with its resolved recipe
    runs/sweeps/<sweep>/recipes/      the children's recipes, as each was begun
    runs/sweeps/<sweep>/logs/         what the children's processes printed
    runs/sweeps/<sweep>/study.db      the study, where Optuna chooses the values
    runs/sweeps/<sweep>/history.json  how many children were over, at what time
    runs/sweeps/<sweep>/tracking/     what MLflow is to show of the sweep

All else (which children are begun, how far they are, how they ended) is in the children's own folders.
"""

import json
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8rl.files import from_sealed, to_sealed, write_atomic
from fp8rl.identity import IdentityError
from fp8rl.lock import read_owner
from fp8rl.recipe.load import changes
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Recipe
from fp8rl.recipe.sweep import POLICY
from fp8rl.runs import Run, RunExistsError
from fp8rl.sweep.expand import Child, LoadedSweep

SWEEPS = "sweeps"
PLAN = "sweep.json"
# Tags of the children's MLflow runs, by which a run folder is known to be of a sweep.
SWEEP_TAG = "fp8rl.sweep"
SWEEP_ID_TAG = "fp8rl.sweep_id"
PARENT_TAG = "mlflow.parentRunId"


class SweepChangedError(RecipeError):
    """A sweep of that name is there with other children. The text lists the differences."""


@dataclass(frozen=True)
class Plan:
    """A committed plan. folder: of the sweep. id: which no other sweep has. flow_run: the Prefect flow
    run that committed it, so that its retry finds the sweep again."""

    folder: Path
    id: str
    flow_run: str
    loaded: LoadedSweep

    @property
    def name(self) -> str:
        return self.loaded.sweep.name

    @property
    def runs(self) -> Path:
        return self.folder.parent.parent

    def run_of(self, child: Child) -> Run | None:
        """The child's run; None where it was not begun.

        Raises RunExistsError where a run of that name is not of this sweep.
        """
        run = Run(self.runs / child.name)
        if not run.folder.exists():
            return None
        try:
            own = run.recipe.tracking.tags.get(SWEEP_ID_TAG) == self.id
        except IdentityError:
            own = True  # damaged: it is looked at, and says so itself
        if not own:
            raise RunExistsError(
                f"child {child.name} of sweep {self.name!r}: {run.describe()}\nThat run is not of this "
                "sweep. Give the sweep another name, or move that run away"
            )
        return run

    def tags(self, mlflow_run: str | None) -> dict[str, str]:
        """Tags of the children's MLflow runs. mlflow_run: the sweep's own."""
        parent = {PARENT_TAG: mlflow_run} if mlflow_run else {}
        return {SWEEP_TAG: self.name, SWEEP_ID_TAG: self.id, **parent}


def sweep_folder(runs: Path, name: str) -> Path:
    return runs / SWEEPS / name


def draft_plan(loaded: LoadedSweep, flow_run: str = "") -> Plan:
    """The plan of a sweep as it is there, else a new one that is not committed.

    Raises SweepChangedError where the one that is there has other children, RunExistsError where a
    child's name is taken by another run, RecipeError where sweep.json is damaged. Changes nothing.
    """
    sweep = loaded.sweep
    folder = sweep_folder(Path(sweep.runs_dir).resolve(), sweep.name)
    values = read_plan(folder)
    if values is None:
        plan = Plan(folder, uuid.uuid4().hex, flow_run, loaded)
    else:
        _require_unchanged(folder, loaded, values)
        plan = Plan(folder, values["id"], values["flow_run"], loaded)
    for child in loaded.children:
        plan.run_of(child)
    return plan


def open_plan(loaded: LoadedSweep, flow_run: str) -> Plan:
    """As `draft_plan`; a new one is committed. For who holds the sweep's lock."""
    plan = draft_plan(loaded, flow_run)
    if not (plan.folder / PLAN).exists():
        about = {"id": plan.id, "flow_run": flow_run, "committed": time.time()}
        write_atomic(plan.folder / PLAN, to_sealed(about | _definition(loaded)))
    return plan


def _require_unchanged(folder: Path, loaded: LoadedSweep, values: dict[str, Any]) -> None:
    if lines := _differences(values, _definition(loaded)):
        shown = lines[:20] + ([f"and {len(lines) - 20} more"] if len(lines) > 20 else [])
        raise SweepChangedError(
            f"sweep {loaded.sweep.name!r} was begun with another plan ({folder / PLAN}):\n  "
            + "\n  ".join(shown)
            + "\nNothing was started. Take the changes back, or give the sweep another name (name=...)"
        )


def read_plan(folder: Path) -> dict[str, Any] | None:
    """sweep.json; None where there is none. Raises RecipeError where it is damaged."""
    path = folder / PLAN
    try:
        return from_sealed(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RecipeError(
            f"{path} is damaged ({error}). The children's runs are whole by themselves: `fp8rl runs` "
            "lists them. Put the file back from a backup, or give the sweep another name"
        ) from None


def name_of_flow(runs: Path, flow_run: str) -> str | None:
    """The name of the sweep that a Prefect flow run has begun, so that its retry goes on with it."""
    for path in (runs / SWEEPS).glob(f"*/{PLAN}"):
        try:
            values = read_plan(path.parent)
        except RecipeError:
            continue
        if values is not None and values["flow_run"] == flow_run:
            return path.parent.name
    return None


def sweeps_at_work(runs: Path) -> list[str]:
    """Names of the sweeps that a process works on now, also where no child of theirs does."""
    owners = {path.parent.name: read_owner(path.parent) for path in (runs / SWEEPS).glob(f"*/{PLAN}")}
    return [name for name, owner in owners.items() if owner is not None and owner.is_alive()]


def params_of(values: dict[str, Any]) -> dict[str, str]:
    """What MLflow shows as the sweep's params: its axes and all else that `values`, a plan, says."""
    flat: dict[str, str] = {}
    for key, value in values["sweep"].items():
        mapping = value if isinstance(value, dict) and value else {"": value}
        flat |= {f"{key}.{k}".rstrip("."): json.dumps(v) for k, v in mapping.items()}
    return flat


def _definition(loaded: LoadedSweep) -> dict[str, Any]:
    """All that makes the children what they are. Budget, failures and parallel are not among it."""
    children = [
        {
            **{"name": child.name, "arm": child.arm, "seed": child.seed, "values": child.values},
            "recipe": child.recipe.model_dump(mode="json"),
        }
        for child in loaded.children
    ]
    sweep = loaded.sweep.model_dump(mode="json", exclude=POLICY | {"runs_dir"})
    # As it is read back: JSON knows no tuples.
    found: dict[str, Any] = json.loads(json.dumps({"sweep": sweep, "children": children}))
    return found


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In words: first those of the sweep file, then those of its children, by recipe key."""
    old, new = before["sweep"], now["sweep"]
    lines = [
        f"{key}: {json.dumps(old.get(key))} -> {json.dumps(new.get(key))}"
        for key in {**old, **new}
        if old.get(key) != new.get(key) and not (key in new and key not in old and not new[key])
    ]
    was = {child["name"]: child for child in before["children"]}
    are = {child["name"]: child for child in now["children"]}
    lines += [f"child {name}: it would be gone" for name in was if name not in are]
    lines += [f"child {name}: it would be new" for name in are if name not in was]
    for name in (name for name in was if name in are):
        pair = [Recipe.model_validate(child[name]["recipe"]) for child in (was, are)]
        one, other = (recipe.model_copy(update={"runs_dir": "runs"}) for recipe in pair)
        for key, (value, becomes) in changes(one, other).items():
            lines.append(f"child {name}: {key}: {value} -> {becomes}")
    return lines
