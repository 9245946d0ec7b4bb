"""A standing Prefect server and a worker: runs that fail, are cancelled or killed, and what the UI's
Retry makes of them.
"""

import os
import signal

import pytest

from flows.automations import NAME
from tests.compare import point_faults, run_differences
from tests.ui.conftest import Trained

pytestmark = pytest.mark.pipeline

STEPS = ("rollout", "reward", "train", "requantize", "recalibrate_kv")
ACTORS = ["ray::EngineActor", "ray::LearnerActor"]


@pytest.fixture(scope="module")
def reference(prefect, runs_dir):
    """The same recipe, without a fault."""
    trained = Trained(prefect, runs_dir, "uninterrupted")
    trained.start()
    assert trained.ended().state["name"] == "Completed"
    return trained


# One run: a step fails, Retry; the flow's process is killed, Retry; it completes.


@pytest.fixture(scope="module")
def one(prefect, runs_dir, reference):
    return Trained(prefect, runs_dir, "fails-then-killed")


@pytest.fixture(scope="module")
def failed(one):
    one.start(**{"raise": "step:train:2", "hang": "learner:train:3:middle"})
    return one.ended()


@pytest.fixture(scope="module")
def killed(one, failed):
    one.prefect.retry(one.id)
    one.reached("hang")
    os.kill(one.prefect.flow_process(one.id).pid, signal.SIGKILL)
    return one.ended()


@pytest.fixture(scope="module")
def completed(one, killed):
    one.prefect.retry(one.id)
    return one.ended()


# Another: cancelled in a rollout, Retry; a step fails; a new flow run resumes it.


@pytest.fixture(scope="module")
def other(prefect, runs_dir, reference):
    return Trained(prefect, runs_dir, "cancelled-then-fails")


@pytest.fixture(scope="module")
def cancelled(other):
    other.start(**{"hang": "engine:rollout:2:1:generated", "raise": "step:train:3"})
    other.reached("hang")
    assert other.prefect.actors(other.id) == ACTORS
    other.prefect.cancel(other.id)
    return other.ended()


@pytest.fixture(scope="module")
def failed_later(other, cancelled):
    other.prefect.retry(other.id)
    return other.ended()


@pytest.fixture(scope="module")
def resumed(other, failed_later):
    first = other.id
    # The run's own recipe counts: of the other one only the runs folder.
    recipe = {"runs_dir": other.recipe["runs_dir"]}
    other.id = other.prefect.run([], resume=other.run.name, recipe=recipe)
    seen = other.ended()
    assert other.id != first
    return seen


def require_as_uninterrupted(trained, reference, seen):
    assert (seen.state["name"], seen.run.state, seen.mlflow) == ("Completed", "finished", "FINISHED")
    assert run_differences(reference.run, trained.run) == []
    assert point_faults(trained.run) == ([], [])


def kept(before, after):
    """Files of committed steps that were not written again."""
    return {name for name, written in before.files.items() if after.files.get(name) == written}


def test_a_failed_step_is_to_be_seen_everywhere(one, failed):
    assert failed.state["type"] == "FAILED"
    assert "planted fault at step:train:2" in failed.state["message"]
    assert (failed.run.state, failed.mlflow) == ("failed", "FAILED")
    assert failed.run.reason == "FaultError: planted fault at step:train:2"
    assert (failed.parts["2"], failed.parts["train-2"]) == ("Failed", "Failed")
    assert failed.parts["rollout-2"] == failed.parts["reward-2"] == "Completed"
    assert "planted fault at step:train:2" in one.prefect.log(one.id)


def test_retry_does_no_committed_step_again(failed, killed):
    cached = {"0", "1", "rollout-2", "reward-2"}
    assert {name for name, state in killed.parts.items() if state == "Cached"} == cached
    redone = {"2", *(f"{step}-2" for step in STEPS[2:]), "rollout-3", "reward-3"}
    assert {killed.parts[name] for name in redone} == {"Completed"}
    assert "00002/steps/reward.json" in failed.files
    assert kept(failed, killed) == set(failed.files)


def test_a_killed_process_is_marked_and_its_records_put_right(one, killed):
    assert killed.state["type"] == "CRASHED"
    assert killed.attempts == ["failed", "killed"]
    assert (killed.run.state, killed.mlflow) == ("killed", "KILLED")
    assert (killed.parts["3"], killed.parts["train-3"]) == ("Crashed", "Crashed")
    assert one.prefect.actors(one.id) == []


def test_a_run_that_failed_and_was_killed_ends_as_an_uninterrupted_one(one, reference, completed):
    require_as_uninterrupted(one, reference, completed)
    assert completed.attempts == ["failed", "killed", "finished"]
    assert completed.parts["reward-3"] == "Cached"
    assert completed.parts["train-3"] == completed.parts["3"] == "Completed"


def test_cancel_ends_a_busy_engine_and_saves_the_learner(other, cancelled):
    assert cancelled.state["type"] == "CANCELLED"
    assert (cancelled.run.state, cancelled.mlflow) == ("cancelled", "KILLED")
    assert other.prefect.actors(other.id) == []
    assert other.run.resume_command() == "fp8rl resume cancelled-then-fails"
    saved = sorted(path.name for path in (other.run.folder / "checkpoints").glob("v*"))
    assert saved[0] == "v00001", saved


def test_retry_of_a_cancelled_run_goes_on_with_the_next_chunk(cancelled, failed_later):
    assert "00002/steps/rollout.json" not in cancelled.files
    assert failed_later.state["type"] == "FAILED"
    assert failed_later.attempts == ["cancelled", "failed"]
    assert failed_later.parts["0"] == failed_later.parts["1"] == "Cached"
    assert failed_later.parts["rollout-2"] == failed_later.parts["train-2"] == "Completed"


def test_a_new_flow_run_resumes_a_failed_run(other, reference, failed_later, resumed):
    require_as_uninterrupted(other, reference, resumed)
    assert resumed.attempts == ["cancelled", "failed", "finished"]
    assert resumed.parts["reward-3"] == "Cached"
    assert "1" not in resumed.parts  # a flow run of its own has nothing to show for iteration 1
    assert kept(failed_later, resumed) == set(failed_later.files)


def test_the_watch_for_silent_runs_is_installed_once(prefect):
    def installed():
        found = prefect.post("/automations/filter")
        return [automation for automation in found if automation["name"] == NAME]

    assert installed() == []
    assert "created" in prefect.command("fp8rl", "watch")
    (first,) = installed()
    assert "is there already" in prefect.command("fp8rl", "watch")
    assert installed() == [first]
    heartbeat = prefect.deployment()["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]
    trigger, (action,) = first["trigger"], first["actions"]
    assert (trigger["posture"], trigger["within"]) == ("Proactive", 3.0 * float(heartbeat))
    assert trigger["after"] == ["prefect.flow-run.heartbeat"]
    assert set(trigger["match_related"]["prefect.resource.id"].split()) == {"prefect.tag.fp8rl"}
    assert (action["type"], action["state"]) == ("change-flow-run-state", "CRASHED")
    assert "fp8rl" in prefect.deployment()["tags"]
    assert "updated" in prefect.command("fp8rl", "watch", "--within", "600")
    (changed,) = installed()
    assert (changed["id"], changed["trigger"]["within"]) == (first["id"], 600.0)
