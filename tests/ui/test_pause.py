"""A run that its guard pauses under a standing Prefect server, and that a person resumes there."""

import pytest

from flows.showing import EVENT
from fp8rl.runs import Run
from tests.ui.conftest import END_S, Trained, until

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

# Passed in every iteration: an FP8 cache never agrees to the last bit with a learner that keeps K and V
# in BF16. The last iteration has none to pause before.
RULE = "guard.rules=[{watch: mismatch, above: 1.0, actions: [pause]}]"
APART = "precision.learner_kv=bf16"


def test_resume_ends_the_pause_and_nothing_else_is_done_again(prefect, runs_dir):
    trained = Trained(prefect, runs_dir, "paused", RULE, APART, "iterations=2")
    trained.start({})
    until("the pause", END_S, lambda: prefect.state(trained.id)["type"] == "PAUSED")
    run = Run(runs_dir / "paused")
    assert run.state().state == "running"
    assert run.journal.is_committed(1, "iteration")
    assert not run.journal.is_committed(2, "rollout")
    assert run.journal.record(1, "train").output["guard"]["skipped"]
    prefect.wait_for_log(trained.id, "the weights were left as they were")

    prefect.resume(trained.id)
    completed = trained.ended()
    assert completed.state["type"] == "COMPLETED"
    assert completed.attempts == ["finished"]
    assert run.journal.record(1, "guard_answer").output == {"answer": "Resume in Prefect"}

    # Both firings are events of this flow run, each once.
    told = prefect.events(EVENT, 2)
    assert [event["payload"]["iteration"] for event in told] == [1, 2]
    for event in told:
        assert event["resource"]["prefect.resource.id"] == f"fp8rl.run.{run.id}"
        related = [one["prefect.resource.id"] for one in event["related"]]
        assert f"prefect.flow-run.{trained.id}" in related
