"""The trained policy as a logged model in MLflow, where the recipe asks for it."""

import shutil

from prefect import task
from prefect.cache_policies import NO_CACHE

from fp8rl import progress
from fp8rl.context import RunContext
from tasks.ray_runtime import wait


def _export_and_log(context: RunContext) -> str:
    from fp8rl.export import ExportFormat, export
    from fp8rl.logged_model import log_model
    from fp8rl.runs import Run

    run, out = Run(context.folder), context.folder / ".policy"
    shutil.rmtree(out, ignore_errors=True)  # of a process that was killed here
    try:
        return log_model(run, export(run, ExportFormat.BF16, out=out))
    finally:
        shutil.rmtree(out, ignore_errors=True)


@task(name="log_model", cache_policy=NO_CACHE)
async def log_final_model(context: RunContext) -> str:
    """Logs the weights of the newest checkpoint, in BF16, to the run's MLflow run; returns the URI.

    Raises as `log_model`.
    """
    import ray

    progress.emit(progress.Event("phase", "the policy goes to MLflow"))
    remote = ray.remote(_export_and_log).options(num_cpus=1, max_retries=0)
    uri: str = await wait(remote.remote(context))
    return uri
