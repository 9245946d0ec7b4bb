"""A standing Prefect server and a worker: a run that fails, is cancelled and is killed, and what Retry
and the parameter `resume` make of it.
"""

import asyncio
import os
import signal

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.automations import NAME, install_zombie_automation
from fp8rl.checkpoints import checkpoint_folder, verify
from fp8rl.runs import Run
from tests.compare import point_faults, run_differences
from tests.ui.conftest import Trained

pytestmark = pytest.mark.pipeline


@pytest.fixture(scope="module")
def broken(prefect, runs_dir):
    """The run that everything happens to, in the order of the fixtures that follow."""
    return Trained(prefect, runs_dir, "broken")


@pytest.fixture(scope="module")
def failed(broken):
    faults = {
        "fails": ("raise", "step:train:2"),
        "is busy": ("hang", "engine:rollout:3:1:generated"),
    }
    broken.start(faults)
    return broken.ended()


@pytest.fixture(scope="module")
def cancelled(broken, failed):
    broken.prefect.retry(broken.id)
    broken.reached("is busy")
    assert broken.prefect.actors(broken.id) == {"EngineActor", "LearnerActor"}
    broken.prefect.cancel(broken.id)
    return broken.ended()


@pytest.fixture(scope="module")
def killed(broken, cancelled):
    broken.resume({"is busy again": ("hang", "engine:evaluate:3:greedy")})
    broken.reached("is busy again")
    os.kill(broken.prefect.flow_process(broken.id).pid, signal.SIGKILL)
    return broken.ended()


@pytest.fixture(scope="module")
def completed(broken, killed):
    broken.prefect.retry(broken.id)
    return broken.ended()


def cached(seen):
    return {name for name, state in seen.parts.items() if state == "Cached"}


def require_kept(before, after):
    """Raises unless all that was committed is there, and was not written again."""
    # A rollout's chunks go when it is whole.
    steps = {name: written for name, written in before.files.items() if "rollout.0" not in name}
    assert {name: after.files.get(name) for name in steps} == steps


def test_a_failed_step_is_to_be_seen_everywhere(broken, failed):
    assert failed.state["type"] == "FAILED"
    assert "planted fault at step:train:2" in failed.state["message"]
    assert (failed.run.state, failed.mlflow) == ("failed", "FAILED")
    assert failed.run.reason == "FaultError: planted fault at step:train:2"
    assert (failed.parts["2"], failed.parts["train-2"]) == ("Failed", "Failed")
    assert failed.parts["rollout-2"] == failed.parts["reward-2"] == "Completed"
    broken.prefect.wait_for_log(broken.id, "planted fault at step:train:2")


def test_retry_does_no_committed_step_again(failed, cancelled):
    assert "00002/steps/reward.json" in failed.files
    require_kept(failed, cancelled)
    assert cached(cancelled) == {"0", "1", "rollout-2", "reward-2"}
    redone = {"2", "train-2", "requantize-2", "recalibrate_kv-2", "evaluate-2"}
    assert {cancelled.parts[name] for name in redone} == {"Completed"}


def test_cancel_ends_a_busy_engine_and_saves_the_learner(broken, cancelled):
    assert cancelled.state["type"] == "CANCELLED"
    assert cancelled.attempts == ["failed", "cancelled"]
    assert (cancelled.run.state, cancelled.mlflow) == ("cancelled", "KILLED")
    assert cancelled.parts["3"] == "Cancelled"
    assert "00003/steps/rollout.0000.json" in cancelled.files
    assert "00003/steps/rollout.json" not in cancelled.files
    verify(checkpoint_folder(broken.run.folder, 2), broken.run.id)


def test_a_new_flow_run_resumes_a_cancelled_run(cancelled, killed):
    require_kept(cancelled, killed)
    # It has nothing to show for what other flow runs did.
    assert not {"0", "1", "2"} & set(killed.parts)
    assert cached(killed) == set()
    assert killed.parts["rollout-3"] == killed.parts["train-3"] == "Completed"


def test_a_killed_process_is_marked_and_its_records_put_right(broken, killed):
    assert killed.state["type"] == "CRASHED"
    assert killed.attempts == ["failed", "cancelled", "killed"]
    assert (killed.run.state, killed.mlflow) == ("killed", "KILLED")
    assert (killed.parts["3"], killed.parts["evaluate-3"]) == ("Crashed", "Crashed")
    broken.prefect.wait_for_log(broken.id, "Retry, or fp8rl resume broken")


def test_after_all_that_the_run_is_as_the_uninterrupted_one(broken, killed, completed, run_arm):
    require_kept(killed, completed)
    assert completed.state["name"] == "Completed"
    assert completed.attempts == ["failed", "cancelled", "killed", "finished"]
    assert (completed.run.state, completed.mlflow) == ("finished", "FINISHED")
    assert run_differences(Run(run_arm("fp8-e2e-kv").journal.folder), broken.run) == []
    assert point_faults(broken.run) == ([], [])


def test_the_watch_for_silent_runs_is_installed_once(prefect):
    def installed():
        found = prefect.post("/automations/filter")
        return [automation for automation in found if automation["name"] == NAME]

    def install(within_s):
        with temporary_settings({PREFECT_API_URL: prefect.api}):
            return asyncio.run(install_zombie_automation(within_s))

    assert installed() == []
    assert "created" in prefect.command("fp8rl", "mark-crashed")
    (first,) = installed()
    assert "is there already" in install(90.0)
    assert installed() == [first]
    deployment = prefect.get("/deployments/name/train/train")
    heartbeat = deployment["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]
    trigger, (action,) = first["trigger"], first["actions"]
    assert (trigger["posture"], trigger["within"]) == ("Proactive", 3.0 * float(heartbeat))
    assert trigger["after"] == ["prefect.flow-run.heartbeat"]
    assert trigger["match_related"]["prefect.resource.id"] == "prefect.tag.fp8rl"
    assert "fp8rl" in deployment["tags"]
    assert (action["type"], action["state"]) == ("change-flow-run-state", "CRASHED")
    assert "updated" in install(600.0)
    (changed,) = installed()
    assert (changed["id"], changed["trigger"]["within"]) == (first["id"], 600.0)
