"""Which failures of a step can pass: told by the real exceptions of Ray, torch and our own."""

import errno
import os

import pytest
import torch
from ray import exceptions as ray
from ray.core.generated.common_pb2 import ActorDiedErrorContext

from fp8rl.checkpoints import CheckpointError
from fp8rl.faults import FaultError
from fp8rl.files import DiskFullError, disk_error
from fp8rl.journal import JournalError
from fp8rl.lock import LockedError
from fp8rl.recipe.rules import RecipeError
from fp8rl.sync.errors import ProofError, SyncError
from tasks.causes import Cause, cause_of

MONITOR = (
    "The actor is dead because its worker process has died. Worker exit type: NODE_OUT_OF_MEMORY "
    "Worker exit detail: Task was killed due to the node running low on memory. The memory monitor "
    "killed it"
)


def died(text: str) -> ray.ActorDiedError:
    """As Ray makes it of what its control store tells."""
    context = ActorDiedErrorContext(
        error_message=text, actor_id=bytes(16), class_name="LearnerActor", pid=7
    )
    return ray.ActorDiedError(context)


def remote(cause: Exception) -> Exception:
    """What `ray.get` raises where `cause` was raised in a task or actor."""
    return ray.RayTaskError("train", f"Traceback ...\n{cause}", cause).as_instanceof_cause()


def raised_from(cause: BaseException) -> RuntimeError:
    """An error that was raised from `cause`, and says nothing itself."""
    error = RuntimeError("the step failed")
    error.__cause__ = cause
    return error


PASSING = [
    (ray.RayActorError(), Cause.ACTOR_DIED),
    (ray.ActorDiedError(), Cause.ACTOR_DIED),
    (died("worker was killed with SIGKILL"), Cause.ACTOR_DIED),
    (ray.ActorUnavailableError("no answer", bytes(16)), Cause.ACTOR_DIED),
    (ray.WorkerCrashedError(), Cause.ACTOR_DIED),
    (ray.LocalRayletDiedError(), Cause.ACTOR_DIED),
    (died(MONITOR), Cause.OUT_OF_MEMORY),
    (ray.OutOfMemoryError("low on memory"), Cause.OUT_OF_MEMORY),
    (ray.NodeDiedError("gone"), Cause.NODE_LOST),
    (ray.ObjectLostError("aa" * 28, None, "here"), Cause.NODE_LOST),
    (ray.OwnerDiedError("aa" * 28, None, "here"), Cause.NODE_LOST),
    (SyncError("bucket 1 is missing"), Cause.NOT_ARRIVED),
    (ray.GetTimeoutError("late"), Cause.TIMEOUT),
    (TimeoutError("step train of iteration 1 took longer than step_timeout_s=1"), Cause.TIMEOUT),
    (MemoryError("planted"), Cause.OUT_OF_MEMORY),
    (torch.OutOfMemoryError("CUDA out of memory"), Cause.OUT_OF_MEMORY),
]
PERMANENT = [
    RecipeError("learner.lr: no"),
    JournalError("x is damaged"),
    CheckpointError("x"),
    LockedError("x"),
    DiskFullError(errno.ENOSPC, "no room to write x"),
    disk_error(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), os.devnull),
    FaultError("planted fault at x"),
    ProofError("the engine does not hold what weight version 1 says"),
    RuntimeError("a check failed"),
    ValueError("samples of weight version [1] in a batch of version 2"),
    AssertionError(),
    KeyboardInterrupt(),
]


def name_of(value) -> str:
    return type(value).__name__ if isinstance(value, BaseException) else str(value.name).lower()


@pytest.mark.parametrize(("error", "cause"), PASSING, ids=name_of)
def test_what_can_pass_is_told_by_its_type_also_where_it_is_the_cause(error, cause):
    assert cause.can_pass
    assert cause_of(error) is cause
    assert cause_of(raised_from(error)) is cause
    assert cause_of(raised_from(raised_from(error))) is cause


@pytest.mark.parametrize("error", PERMANENT, ids=name_of)
def test_what_fails_again_is_permanent(error):
    assert cause_of(error) is Cause.PERMANENT
    assert not Cause.PERMANENT.can_pass
    assert cause_of(raised_from(error)) is Cause.PERMANENT


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (MemoryError("x"), Cause.OUT_OF_MEMORY),
        (TimeoutError("x"), Cause.TIMEOUT),
        (ray.ActorDiedError(), Cause.ACTOR_DIED),  # an actor that asked another one
        (ValueError("x"), Cause.PERMANENT),
        (RecipeError("x"), Cause.PERMANENT),
        (DiskFullError(errno.ENOSPC, "x"), Cause.PERMANENT),
        (FaultError("x"), Cause.PERMANENT),
    ],
    ids=name_of,
)
def test_what_user_code_raised_in_an_actor_counts_as_what_it_is(error, cause):
    assert cause_of(remote(error)) is cause
    # As tasks.ray_runtime.wait raises it.
    error.__cause__ = ray.RayTaskError("train", "Traceback ...", error)
    assert cause_of(error) is cause


class Sealed(MemoryError):
    """Cannot be subclassed, so Ray raises its own error, with this one inside."""

    def __init_subclass__(cls):
        raise TypeError("sealed")


def test_what_ray_cannot_raise_as_what_it_is_is_looked_into():
    error = remote(Sealed("x"))
    assert not isinstance(error, MemoryError)
    assert cause_of(error) is Cause.OUT_OF_MEMORY


def test_torch_that_cannot_allocate_on_the_cpu():
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 48)
    assert type(error.value) is RuntimeError  # so its text has to tell
    assert "DefaultCPUAllocator: can't allocate memory" in str(error.value)
    assert cause_of(error.value) is Cause.OUT_OF_MEMORY
    assert cause_of(remote(error.value)) is Cause.OUT_OF_MEMORY


def test_an_actor_whose_constructor_raised_would_raise_again():
    cause = ray.RayTaskError("LearnerActor.__init__", "Traceback ...\nValueError: no", ValueError("no"))
    error = ray.ActorDiedError(cause)
    assert error.actor_init_failed
    assert cause_of(error) is Cause.PERMANENT


def test_a_chain_that_goes_in_a_circle_ends():
    one, two = RuntimeError("one"), RuntimeError("two")
    one.__cause__, two.__cause__ = two, one
    assert cause_of(one) is Cause.PERMANENT


def test_every_cause_says_in_words_what_it_is():
    assert {str(cause) for cause in Cause} == {
        "an engine or learner process died",
        "a node was lost",
        "it took too long",
        "weights did not arrive as they were sent",
        "memory ran out",
        "trying again would fail again",
    }
