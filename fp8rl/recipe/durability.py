"""The recipe's choices of what outlives a failure: checkpoints, retries, stops in good order."""

from enum import StrEnum

from fp8rl.recipe.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class BestMode(StrEnum):
    MAX = "max"
    MIN = "min"


class Checkpoint(Section):
    """Checkpoints of the learner: weights, optimiser, random states. Between them training is replayed
    over the journalled rollouts, without generating, so a crash costs at most `every` training steps.
    """

    every: PositiveInt = 5
    """Iterations from one checkpoint to the next; the last iteration always has one."""
    keep_last: PositiveInt = 2
    """So many of the newest are kept."""
    keep_best: NonNegativeInt = 1
    """Kept besides the newest: so many of the best by `metric`."""
    metric: str = "val/accuracy"
    """What tells the best: a metric of an evaluation."""
    mode: BestMode = BestMode.MAX
    """Whether the best is the greatest or the least."""
    asynchronous: bool = True
    """Write from a copy in the background, while the next iteration runs."""
    grace_s: NonNegativeFloat = 20.0
    """On SIGTERM (a cancellation, a preempted machine) the learner gets so long to save."""


class Retry(Section):
    """Steps that fail for a cause that can pass (a process or node died, a time-out, memory ran out)
    are tried again; others fail at once."""

    attempts: NonNegativeInt = 2
    """Of one step, after the first."""
    delay_s: NonNegativeFloat = 2.0
    """Before the first; each one after that waits four times as long."""
    budget: NonNegativeInt = 20
    """Of all steps together, in one attempt at the run."""
    smaller_micro_batch: bool = True
    """Train with half the micro-batch, once, where memory ran out. FP8 gradients depend on it a little
    (learner.micro_batch); what each step used is in its record."""


class Stop(Section):
    """Where to stop in good order: checkpointed, to be resumed."""

    after_iteration: PositiveInt | None = None
    """Stop after this iteration. Empty: after the last one."""
    time_limit_s: PositiveFloat | None = None
    """Wall time of one attempt. It stops before the iteration that would not end in time."""
