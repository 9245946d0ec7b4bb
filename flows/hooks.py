"""What happens when Prefect finds that a training run's process is gone or was cancelled.

Prefect's runner calls these in its own process, also where the flow's was killed outright.
"""

from typing import Any

from prefect.logging.loggers import flow_run_logger

from flows.asked import asked_runs
from fp8rl.recipe.rules import RecipeError
from fp8rl.runs import run_of_flow


async def put_right_after(flow: Any, flow_run: Any, state: Any) -> None:
    """Puts the records of the flow run's training run right, where its process could not, and says so
    in the flow run's log.
    """
    from flows.reap import put_run_right

    try:
        runs = asked_runs(flow_run.parameters)
    except RecipeError as error:  # the recipe file was changed or taken away since
        text = f"its records are not put right ({error}). `fp8rl reap` does that"
        flow_run_logger(flow_run, flow).warning(text)
        return
    run = run_of_flow(runs, str(flow_run.id))
    if run is None:
        return
    done = await put_run_right(run)
    if done and run.resume_command():
        done.append(f"Retry, or {run.resume_command()}, goes on with the next step")
    for line in done:
        flow_run_logger(flow_run, flow).warning(line.strip())
