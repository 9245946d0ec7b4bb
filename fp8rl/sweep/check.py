"""Everything that can be known of a sweep before anything starts."""

from pathlib import Path

from fp8rl.preflight import require_runnable
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.sweep import Method
from fp8rl.sweep.expand import LoadedSweep, load_sweep, require_children_runnable
from fp8rl.sweep.plan import Plan, draft_plan, name_of_flow
from fp8rl.sweep.study import require_optuna


def checked_sweep(path: Path, overrides: list[str], flow_run_id: str = "") -> tuple[LoadedSweep, Plan]:
    """The sweep with all that can be known before anything starts, and its plan, not committed.

    flow_run_id: the Prefect flow run, whose retry goes on with the sweep that it began. Raises
    RecipeError, SweepChangedError or RunExistsError with every reason; nothing was changed then.
    """
    loaded = load_sweep(path, overrides)
    if flow_run_id and (name := name_of_flow(Path(loaded.sweep.runs_dir).resolve(), flow_run_id)):
        loaded = load_sweep(path, [*overrides, f"name={name}"])
    if loaded.sweep.method is Method.OPTUNA:
        require_optuna()
    plan = draft_plan(loaded)
    trackings = {child.recipe.tracking.model_dump_json() for child in loaded.children}
    if len(trackings) > 1:
        raise RecipeError(
            f"{path}: the children's tracking differs: {' and '.join(sorted(trackings))}. MLflow shows "
            "them under the sweep only in one place: set tracking in overrides"
        )
    # What is begun has been asked, and may have lost since what only a beginning needs.
    waiting = [c for c in loaded.children if plan.run_of(c) is None]
    is_study = loaded.sweep.optuna is not None
    require_children_runnable(loaded, require_runnable, None if is_study else waiting)
    return loaded, plan
