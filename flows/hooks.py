"""What happens when Prefect finds that a training run's process is gone or was cancelled.

Prefect's runner calls these in its own process, also where the flow's was killed outright.
"""

from pathlib import Path
from typing import Any

from prefect.logging.loggers import flow_run_logger

from fp8rl.runs import run_of_flow


async def put_right_after(flow: Any, flow_run: Any, state: Any) -> None:
    """Puts the records of the flow run's training run right, where its process could not, and says so
    in the flow run's log.
    """
    from flows.reap import put_run_right

    recipe = flow_run.parameters.get("recipe") or {}
    runs = recipe.get("runs_dir", "runs") if isinstance(recipe, dict) else recipe.runs_dir
    run = run_of_flow(Path(runs).resolve(), str(flow_run.id))
    if run is None:
        return
    done = await put_run_right(run)
    if done and run.resume_command():
        done.append(f"Retry, or {run.resume_command()}, goes on with the next step")
    for line in done:
        flow_run_logger(flow_run, flow).warning(line.strip())
