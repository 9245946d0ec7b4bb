"""Carrying a run on under another recipe: a new run that starts from a checkpoint of its parent."""

import shutil
import uuid
from pathlib import Path
from typing import Any

from fp8rl import checkpoints, guard
from fp8rl.files import disk_error
from fp8rl.lock import RunLock
from fp8rl.recipe.load import changes
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Recipe, changes_numbers
from fp8rl.runs import Run, RunExistsError, building_folder


def number_changes(old: Recipe, new: Recipe) -> dict[str, tuple[str, str]]:
    """{key: (old, new)} of the differences that can change a run's numbers."""
    return {key: pair for key, pair in changes(old, new).items() if changes_numbers(key)}


def require_resumable(run: Run, new: Recipe, done: int) -> None:
    """Raises RecipeError where `run`, with `done` iterations behind it, cannot go on as `new`."""
    differing = number_changes(run.recipe, new)
    if differing:
        lines = [f"  {key}: {old} -> {after}" for key, (old, after) in sorted(differing.items())]
        raise RecipeError(
            f"run {run.name!r} cannot go on with another value of\n"
            + "\n".join(lines)
            + "\nwhich can change its numbers. `--fork NEW_NAME` starts a new run with it from this "
            "one's newest checkpoint"
        )
    if new.iterations < done:
        raise RecipeError(
            f"iterations: {new.iterations}, but {done} of run {run.name!r} are done already"
        )


def fork(
    parent: Run, name: str, recipe: Recipe, about: dict[str, Any], at: int | None = None
) -> tuple[Run, RunLock]:
    """A new run `name` of `recipe` that starts from the newest whole checkpoint of `parent`.

    at: from that of weight version `at`, no other. Raises RecipeError where the model is another or
    there is no such checkpoint, and RunExistsError where the name is taken.
    """
    other_model = [k for k in number_changes(parent.recipe, recipe) if k.startswith("model.")]
    if other_model:
        raise RecipeError(f"{', '.join(other_model)}: a fork has its parent's model")
    runs = parent.folder.parent
    if (runs / name).exists():
        raise RunExistsError(Run(runs / name).describe())
    checkpoint, there = checkpoints.choose(parent.folder, at, parent.id)
    if checkpoint is None:
        wanted = "no whole checkpoint" if at is None else f"no whole checkpoint of version {at}"
        raise RecipeError(f"run {parent.name!r} has {wanted} {there}")
    if checkpoint.version >= recipe.iterations:
        raise RecipeError(
            f"iterations: {recipe.iterations}, and the checkpoint is of iteration "
            f"{checkpoint.version} already; ask for more, or for an earlier one with --at"
        )
    building = building_folder(runs, name)
    try:
        identity = uuid.uuid4().hex
        _copy_checkpoint(checkpoint, building, identity)
        if (parent.folder / "model").is_dir():
            shutil.copytree(parent.folder / "model", building / "model")
        values = about | {
            "id": identity,
            "origin": checkpoint.version,
            "parent": {
                "run": parent.name,
                "id": parent.id,
                "version": checkpoint.version,
                "weights": checkpoint.weights_digest,
                "guard": guard.window(parent.journal, recipe.guard, checkpoint.version, parent.origin),
                "changes": {key: list(pair) for key, pair in changes(parent.recipe, recipe).items()},
            },
        }
        return Run.create(runs, name, recipe, values, fill=building)
    except BaseException as error:
        shutil.rmtree(building, ignore_errors=True)
        # Copying a folder collects its errors in one of its own, with the cause in its text.
        if isinstance(error, OSError) and (told := disk_error(error, runs / name)) is not error:
            raise told from error
        raise


def _copy_checkpoint(checkpoint: checkpoints.Checkpoint, building: Path, run_id: str) -> None:
    """The same tensors and state, with a manifest that names the new run."""
    target = checkpoints.checkpoint_folder(building, checkpoint.version)
    shutil.copytree(checkpoint.folder, target)
    (target / checkpoints.MANIFEST).unlink()
    checkpoints.write_manifest(
        target,
        run_id=run_id,
        version=checkpoint.version,
        weights_digest=checkpoint.weights_digest,
        recipe_digest=checkpoint.recipe_digest,
    )
