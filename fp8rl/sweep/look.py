"""What has become of a child: read from its run folder each time, so that no record can be stale."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

from fp8rl.identity import IdentityError
from fp8rl.journal import ITERATION, JournalError
from fp8rl.runs import Run
from fp8rl.sweep.expand import Child
from fp8rl.sweep.plan import Plan
from fp8rl.tracking_queue import Queue

ACCURACY = "val/accuracy"
MISMATCH = "mismatch/token_mult_prob_error"
FAILED = ("failed", "killed")


@dataclass(frozen=True)
class ChildState:
    """state: waiting (not begun), or that of its run. settled: it is over, and a start of the sweep
    leaves it as it is. iteration: the last whole one. seconds: wall time of its processes. accuracy: of
    the last evaluation; mismatch: median over the iterations."""

    state: str
    reason: str = ""
    settled: bool = False
    iteration: int = 0
    seconds: float = 0.0
    accuracy: float | None = None
    mismatch: float | None = None
    mlflow_run: str | None = None

    @property
    def is_failed(self) -> bool:
        return self.state in FAILED


WAITING = ChildState("waiting")


def look(plan: Plan, child: Child, *, retry: bool = True) -> ChildState:
    """The child's state now. retry: whether a failed one may be carried on; then it is not settled.

    Raises RunExistsError as `Plan.run_of`.
    """
    run = plan.run_of(child)
    if run is None:
        return WAITING
    try:
        return _look(run, retry)
    except (IdentityError, JournalError) as error:
        return ChildState("failed", str(error), settled=True)


def _look(run: Run, retry: bool) -> ChildState:
    found = run.state()
    records = run.journal.iterations()
    accuracies = [r.metrics[ACCURACY] for r in records if ACCURACY in r.metrics]
    mismatches = [r.metrics[MISMATCH] for r in records if MISMATCH in r.metrics]
    return ChildState(
        found.state,
        "" if found.state == "running" else found.reason,
        settled=_is_settled(run, found.state, retry),
        iteration=records[-1].iteration if records else 0,
        seconds=sum(_seconds(run, attempt) for attempt in run.attempts()),
        accuracy=accuracies[-1] if accuracies else None,
        mismatch=statistics.median(mismatches) if mismatches else None,
        mlflow_run=Queue(run.folder / "tracking").state.mlflow_run,
    )


def _is_settled(run: Run, state: str, retry: bool) -> bool:
    if state == "finished":
        return True
    if state == "failed":
        return not retry
    if state == "stopped":
        # At its guard's word, or where its recipe says so: both would need another word to go on.
        after = run.recipe.stop.after_iteration
        reached = after is not None and run.journal.is_committed(after, ITERATION)
        return reached or "guard_asked" in run.attempts()[-1]
    return False


def _seconds(run: Run, attempt: dict[str, Any]) -> float:
    """Wall time of an attempt. Of one that was killed it is not known when; its last record tells."""
    started = float(attempt["started"])
    if attempt["state"] == "running" and not run.state().is_over:
        return time.time() - started
    if attempt["state"] in ("running", "killed"):
        times = [path.stat().st_mtime for path in run.folder.glob("iterations/*/steps/*.json")]
        later = [a["started"] for a in run.attempts() if a["number"] > attempt["number"]]
        before = [t for t in times if t < min(later, default=time.time())]
        return max([0.0, *(t - started for t in before)])
    return float(attempt.get("ended", started)) - started


def metric_of(plan: Plan, child: Child, name: str) -> dict[int, float]:
    """{iteration: value} of a metric of the child, where it has one."""
    run = plan.run_of(child)
    records = run.journal.iterations() if run else []
    return {r.iteration: r.metrics[name] for r in records if name in r.metrics}
