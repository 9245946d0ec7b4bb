"""Runs that stop and go on: in good order, from an earlier step, as a fork, with less memory."""

import asyncio
import json

import pytest

from fp8rl import checkpoints, faults
from fp8rl.lock import RunLock
from fp8rl.recipe.load import load_recipe, with_overrides
from fp8rl.rewind import rewind
from fp8rl.runs import Run, State
from tests.arms import SHORT, TINY
from tests.compare import point_faults, run_differences

pytestmark = pytest.mark.pipeline


def recipe_of(runs_dir, name, *overrides, arm="bf16"):
    return load_recipe(
        TINY / f"{arm}.yaml",
        [*SHORT, f"runs_dir={runs_dir}", f"name={name}", "retry.delay_s=0.1", *overrides],
    ).recipe


def train(recipe, resume=None):
    from flows.training import train

    return asyncio.run(train(recipe=recipe, resume=resume))


def assert_equal_to_the_straight_run(run, reference):
    assert run_differences(reference, run) == []
    assert point_faults(run) == ([], [])
    assert run.state() == State("finished")


@pytest.fixture
def straight(run_arm):
    return Run(run_arm("bf16").journal.folder)


def test_a_run_that_was_stopped_in_good_order_goes_on_bit_by_bit(runs_dir, straight):
    from prefect.exceptions import CancelledRun

    recipe = recipe_of(runs_dir, "stopped", "stop.after_iteration=1")
    with pytest.raises(CancelledRun, match="stopped after iteration 1"):
        train(recipe)
    run = Run(runs_dir / "stopped")
    assert run.state().state == "stopped"
    assert checkpoints.listing(run.folder) == [1]
    first = run.journal.record(1, "rollout")
    lock = RunLock(run.folder)
    run.change_recipe(with_overrides(run.recipe, ["stop.after_iteration=null"]))
    lock.release()
    train(recipe, resume="stopped")
    assert run.journal.record(1, "rollout") == first
    assert_equal_to_the_straight_run(run, straight)
    start = run.attempts()[-1]
    assert start["first_new_step"] == "rollout of iteration 2"
    assert start["start_s"]["replay"] == pytest.approx(0, abs=0.1)
    assert {"Ray", "MLflow", "engines", "total"} <= start["start_s"].keys()


def test_a_run_stops_before_the_iteration_that_would_not_end_in_time(runs_dir, run_arm):
    from prefect.exceptions import CancelledRun

    run_arm("bf16")  # for the warm start
    with pytest.raises(CancelledRun, match=r"stop.time_limit_s=0.1"):
        train(recipe_of(runs_dir, "timed", "stop.time_limit_s=0.1"))
    run = Run(runs_dir / "timed")
    assert run.state().state == "stopped"
    assert run.last_step() == "iteration 0 is complete"


def test_going_back_to_a_step_does_it_and_all_after_it_again(runs_dir, straight):
    recipe = recipe_of(runs_dir, "rewound")
    train(recipe)
    run = Run(runs_dir / "rewound")
    before = {n: run.journal.record(n, "train").t_ms for n in (1, 2, 3)}
    lock = RunLock(run.folder)
    rewind(run, 2, "train")
    lock.release()
    assert run.last_step() == "reward of iteration 2"
    train(recipe, resume="rewound")
    after = {n: run.journal.record(n, "train").t_ms for n in (1, 2, 3)}
    assert after[1] == before[1]
    assert after[2] > before[3]
    assert_equal_to_the_straight_run(run, straight)
    assert len(list(run.folder.glob("set_aside/*/iterations/*/steps/train.json"))) == 2


def test_a_fork_starts_from_its_parents_checkpoint_with_another_recipe(runs_dir, straight):
    from mlflow import MlflowClient

    from flows.opening import identity
    from fp8rl.fork import fork
    from fp8rl.tracking import tracking_uri

    parent = straight
    version = checkpoints.listing(parent.folder)[-1]
    kl = ["learner.kl.use=loss", "learner.kl.beta=0.01"]
    changed = with_overrides(
        parent.recipe, ["learner.lr=3e-5", *kl, f"iterations={version + 1}", "name=forked"]
    )
    run, lock = fork(parent, "forked", changed, identity(changed))
    lock.release()
    summary = train(changed, resume="forked")
    assert run.origin == version
    assert run.about["parent"]["run"] == parent.name
    assert run.about["parent"]["changes"]["learner.lr"] == ["0.0001", "3e-05"]
    # It began with the parent's weights, and went its own way.
    mine, theirs = (r.journal.record(version, "requantize").output for r in (run, parent))
    assert mine == theirs
    trained = run.journal.record(version + 1, "train").metrics
    assert trained["train/lr"] == pytest.approx(3e-5)
    # The reference policy is the one that the parent began with, not the checkpoint.
    assert trained["train/reference_kl"] > 0
    assert point_faults(run) == ([], [])
    tags = MlflowClient(tracking_uri(changed)).get_run(summary["mlflow_run"]).data.tags
    assert tags["fp8rl.parent"] == f"{parent.name}@{version}"


def test_where_memory_runs_out_the_micro_batch_is_halved_once_and_said(runs_dir, run_arm, monkeypatch):
    run_arm("bf16")
    marker = runs_dir / "memory.marker"
    planted = [{"at": "learner:train:2:middle", "do": "memory", "once": str(marker)}]
    monkeypatch.setenv(faults.VARIABLE, json.dumps(planted))
    train(recipe_of(runs_dir, "memory", "checkpoint.every=1"))
    assert marker.exists()
    run = Run(runs_dir / "memory")
    sizes = [run.journal.record(n, "train").output["micro_batch"] for n in (1, 2, 3)]
    assert sizes == [128, 64, 64]
