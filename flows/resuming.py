"""A run that is carried on, from Prefect's form: its name, and what is to change."""

from typing import Any

from prefect import flow
from prefect.runtime import flow_run
from rich.console import Console

from flows.asked import OptionalText, Overrides, asked_name, asked_runs
from flows.cli_runs import prepare_resume
from flows.hooks import put_right_after
from flows.training import train_run


def _flow_run_name() -> str:
    return asked_name(flow_run.get_parameters())


@flow(
    name="resume",
    flow_run_name=_flow_run_name,
    on_crashed=[put_right_after],
    on_cancellation=[put_right_after],
)
async def resume(
    run: str,
    overrides: Overrides = [],  # noqa: B006  never changed
    runs_dir: OptionalText = "",
) -> Any:
    """Carries a run on from the step that failed, or that was never reached; returns its summary.

    Raises as `train`, and RecipeError for a change that needs a fork.

    Args:
        run: Name of the run; `fp8rl runs` lists them.
        overrides: Values to change that change no number, one in each item, as key=value:
            iterations=80, stop.after_iteration=null. Others need a fork, which `fp8rl resume --fork`
            makes.
        runs_dir: Where runs are kept. Empty: runs.
    """
    # A retry comes by here again, and changes nothing the second time.
    runs = asked_runs({"run": run, "runs_dir": runs_dir})
    recipe, name = prepare_resume(
        runs,
        run,
        overrides or [],
        from_step=None,
        fork_as=None,
        at=None,
        console=Console(quiet=True),
    )
    return await train_run(recipe, name)
