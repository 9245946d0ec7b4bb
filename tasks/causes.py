"""Why a step failed, and whether trying again can help."""

from enum import StrEnum

from fp8rl.sync.errors import SyncError


class Cause(StrEnum):
    ACTOR_DIED = "an engine or learner process died"
    NODE_LOST = "a node was lost"
    TIMEOUT = "it took too long"
    NOT_ARRIVED = "weights did not arrive as they were sent"
    OUT_OF_MEMORY = "memory ran out"
    PERMANENT = "trying again would fail again"

    @property
    def can_pass(self) -> bool:
        return self is not Cause.PERMANENT


def cause_of(error: BaseException) -> Cause:
    """The cause of a step's failure, by the type of `error` and of what it was raised from.

    What no type here tells is permanent: a bad recipe, a corrupt file, a failed check, a bug.
    """
    for one in _chain(error):
        cause = _by_type(one)
        if cause is not None:
            return cause
    return Cause.PERMANENT


def _chain(error: BaseException | None) -> list[BaseException]:
    from ray.exceptions import RayTaskError

    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        # What a remote function raised is inside Ray's error, which is mostly of its type too.
        inside = error.cause if isinstance(error, RayTaskError) else None
        error = error.__cause__ or inside
    return found


def _by_type(error: BaseException) -> Cause | None:
    from ray import exceptions as ray

    if isinstance(error, MemoryError | ray.OutOfMemoryError):
        return Cause.OUT_OF_MEMORY
    # torch.OutOfMemoryError (CUDA) by name, since nothing here imports torch; on a CPU torch raises
    # a bare RuntimeError.
    if type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator: can't allocate" in str(
        error
    ):
        return Cause.OUT_OF_MEMORY
    if isinstance(error, ray.RayActorError):  # died or unavailable
        if "creation task" in str(error):
            return Cause.PERMANENT  # its constructor raised: vLLM refused a setting, a file is missing
        # Ray's memory monitor ends an actor like any other death and says why in words.
        low = "memory" in str(error) and "killed" in str(error) and "monitor" in str(error)
        return Cause.OUT_OF_MEMORY if low else Cause.ACTOR_DIED
    if isinstance(error, ray.WorkerCrashedError | ray.LocalRayletDiedError):
        return Cause.ACTOR_DIED
    if isinstance(error, ray.NodeDiedError | ray.ObjectLostError):
        return Cause.NODE_LOST
    if isinstance(error, SyncError):
        return Cause.NOT_ARRIVED
    if isinstance(error, TimeoutError | ray.GetTimeoutError):
        return Cause.TIMEOUT
    return None


def first_line(error: BaseException) -> str:
    """The first line of what `error` says, or its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
