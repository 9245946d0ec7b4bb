"""Ray, as the steps use it: start, actors by name, and waiting that can be cancelled."""

import asyncio
import itertools
import os
import signal
from typing import Any

from fp8rl import faults
from fp8rl.context import RunContext
from fp8rl.device import compute_environment
from fp8rl.services.plan import RAY_OBJECT_STORE_BYTES

NAMESPACE = "fp8rl"
# The kinds of a run's actors. The BF16 engine is there where evaluate.bf16 asks for it.
LEARNER, ENGINE, BF16_ENGINE = "learner", "engine", "bf16-engine"


class ActorStartError(RuntimeError):
    """The constructor of an engine or learner raised: a setting that it refuses, a missing file."""


def start_ray() -> None:
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
            object_store_memory=RAY_OBJECT_STORE_BYTES,
            **common,
        )
    signal.signal(signal.SIGTERM, handler)


# Ray ends an actor with the last handle to it, so the flow process keeps them for the run's life.
_handles: dict[str, Any] = {}
_numbers = itertools.count(1)
# Those of them that have answered once.
_answered: set[str] = set()


def _actor(context: RunContext, kind: str, cls: type, *args: Any) -> Any:
    """The run's actor of this kind, created on first use. It dies with the process that created it."""
    import ray

    name = context.actor_name(kind)
    if name not in _handles:
        _handles[name] = (
            ray.remote(cls)
            .options(
                # Another process may still be dying under the plain name on a Ray that is shared.
                name=f"{name}:{os.getpid()}:{next(_numbers)}",
                namespace=NAMESPACE,
                num_cpus=0,
                max_restarts=0,
                max_task_retries=0,  # an optimiser step must never be applied twice
                runtime_env={"env_vars": compute_environment(context.recipe) | _planted()},
            )
            .remote(*args)
        )
    return _handles[name]


def _planted() -> dict[str, str]:
    """Faults that a test planted reach the actors too, also those of a Ray that was up before."""
    planted = os.environ.get(faults.VARIABLE)
    return {} if planted is None else {faults.VARIABLE: planted}


def learner_actor(context: RunContext) -> Any:
    """The learner of the run."""
    from tasks.learner_actor import LearnerActor

    return _actor(context, LEARNER, LearnerActor)


def engine_actor(context: RunContext, kind: str = ENGINE) -> Any:
    """The rollout engine of the run, or its engine of another kind; creating it starts vLLM, in the
    background."""
    from tasks.engine_actor import EngineActor

    return _actor(context, kind, EngineActor, context)


def actor_of(context: RunContext, kind: str) -> Any:
    """The run's actor of this kind."""
    return learner_actor(context) if kind == LEARNER else engine_actor(context, kind)


def is_new(context: RunContext, kind: str) -> bool:
    """Whether this process has made no actor of this kind for the run yet."""
    return context.actor_name(kind) not in _handles


def has_answered(context: RunContext, kind: str) -> bool:
    """Whether the run's actor of this kind has ever answered: until then it is starting."""
    return context.actor_name(kind) in _answered


def note_answer(context: RunContext, kind: str) -> None:
    """Notes that the run's actor of this kind is up."""
    _answered.add(context.actor_name(kind))


def release_actor(context: RunContext, kind: str) -> None:
    """Ends the run's actor of this kind, whatever it is doing."""
    import ray

    _answered.discard(context.actor_name(kind))
    handle = _handles.pop(context.actor_name(kind), None)
    if handle is not None and ray.is_initialized():
        ray.kill(handle, no_restart=True)


def release(context: RunContext) -> None:
    """Ends the actors of the run, whatever they are doing."""
    for kind in (LEARNER, ENGINE, BF16_ENGINE):
        release_actor(context, kind)


async def until_there(ref: Any, *, fetch: bool = True) -> None:
    """Waits until a call has ended; with `fetch`, until its value is on this machine.

    One that failed is there too: it fails whoever takes its value.
    """
    import ray

    pause = 0.002
    while not ray.wait([ref], timeout=0, fetch_local=fetch)[0]:
        await asyncio.sleep(pause)
        pause = min(0.02, pause * 1.5)


async def wait(ref: Any) -> Any:
    """The value of a Ray reference.

    Polls instead of blocking in `ray.get`, which neither a time limit nor a cancellation reaches.
    Raises what the remote call raised: the exception itself, caused by Ray's own with its trace; and
    ActorStartError where the actor could not be made.
    """
    import ray

    await until_there(ref)
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise
    except ray.exceptions.RayActorError as error:
        if "creation task" not in str(error):
            raise
        last = str(error).strip().splitlines()[-1]  # what its constructor raised, after the traces
        raise ActorStartError(f"an actor could not start: {last}") from error
