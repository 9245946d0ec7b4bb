"""Ray, as the steps use it: start, actors by name, and waiting that can be cancelled."""

import asyncio
import os
import signal
import time
from typing import Any

from fp8rl.context import RunContext
from fp8rl.device import compute_environment
from fp8rl.recipe.schema import Recipe

NAMESPACE = "fp8rl"
# No step of the recipes at hand comes near it; a hung engine ends a run instead of holding it.
STEP_TIMEOUT_S = 3600.0


def start_ray(recipe: Recipe) -> None:
    """Connects to RAY_ADDRESS, or starts a small local Ray. Does nothing where one is connected.

    Ray replaces the SIGTERM handler with one that exits, and Prefect's, through which a cancelled
    run is told, would be lost: it is put back.
    """
    import ray

    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    handler = signal.getsignal(signal.SIGTERM)
    common: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    if os.environ.get("RAY_ADDRESS"):
        ray.init(address=os.environ["RAY_ADDRESS"], **common)
    else:
        ray.init(
            address="local",  # without it Ray joins whatever cluster it finds on this machine
            num_cpus=len(os.sched_getaffinity(0)),
            include_dashboard=False,
            object_store_memory=200 * 2**20,
            **common,
        )
    signal.signal(signal.SIGTERM, handler)


# Ray ends an actor with the last handle to it, so the flow process keeps them for the run's life.
_handles: dict[str, Any] = {}


def _actor(name: str, cls: type, recipe: Recipe, *args: Any) -> Any:
    """The actor `name`, created where there is none. It dies with the process that created it."""
    import ray

    if name in _handles:
        return _handles[name]
    _handles[name] = (
        ray.remote(cls)
        .options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=True,
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,  # an optimiser step must never be applied twice
            runtime_env={"env_vars": compute_environment(recipe)},
        )
        .remote(*args)
    )
    return _handles[name]


def learner_actor(run: str, recipe: Recipe) -> Any:
    """The learner of `run`."""
    from tasks.actors import LearnerActor

    return _actor(f"learner:{run}", LearnerActor, recipe)


def engine_actor(context: RunContext) -> Any:
    """The rollout engine of the run; creating it starts vLLM, in the background."""
    from tasks.actors import EngineActor

    return _actor(f"engine:{context.run}", EngineActor, context.recipe, context)


def release(run: str) -> None:
    """Ends the actors of `run`, whatever they are doing."""
    import ray

    if not ray.is_initialized():
        return
    for name in (f"learner:{run}", f"engine:{run}"):
        handle = _handles.pop(name, None)
        if handle is not None:
            ray.kill(handle, no_restart=True)


async def wait(ref: Any, timeout: float = STEP_TIMEOUT_S) -> Any:
    """The value of a Ray reference.

    Polls instead of blocking in `ray.get`, which neither a time limit nor a cancellation reaches.
    Raises TimeoutError after `timeout` seconds, and what the remote call raised.
    """
    import ray

    deadline = time.monotonic() + timeout
    pause = 0.002
    while not ray.wait([ref], timeout=0)[0]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer from Ray within {timeout:.0f} s")
        await asyncio.sleep(pause)
        pause = min(0.02, pause * 1.5)
    return ray.get(ref)


async def require_versions(context: RunContext, version: int) -> tuple[Any, Any]:
    """(engine, learner), both holding weight `version`; raises RuntimeError where one does not."""
    engine, learner = engine_actor(context), learner_actor(context.run, context.recipe)
    status = await wait(engine.status.remote())
    held = await wait(learner.version.remote())
    if status["version"] != version or held != version:
        raise RuntimeError(
            f"weight version {version} is wanted; the engine holds {status['version']}, the learner "
            f"{held}. One of them was restarted; carrying on from the run folder is not built yet"
        )
    return engine, learner
