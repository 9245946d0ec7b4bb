"""The order of a sweep's children, its budget and its failures. The children's runs are real folders,
made by a fake that takes the place of the training; tests/pipeline/test_sweep.py has the real one.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from flows.sweep import _ends
from fp8rl.lock import RunLock
from fp8rl.recipe.rules import RecipeError
from fp8rl.runs import Run, State
from fp8rl.sweep import study
from fp8rl.sweep.drive import Drive, Tally
from fp8rl.sweep.look import ACCURACY, look, metric_of
from fp8rl.sweep.plan import Plan
from fp8rl.sweep.study import source_of
from tests.folders import this_attempt
from tests.sweeps import Killed, Training, plan_of, start, states

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny"


CHILDREN = [f"s-bf16-s{seed}" for seed in range(4)]


def test_children_are_trained_one_after_another_in_their_order(tmp_path):
    plan = plan_of(tmp_path)
    training = Training(plan)
    tally, told = start(plan, training)
    assert training.begun == CHILDREN
    assert training.most == 1
    assert states(tally) == ["finished"] * 4
    assert _ends(tally).state == "finished"
    assert list(told[0].values()) == ["waiting"] * 4
    first = tally.states[CHILDREN[0]]
    assert (first.iteration, first.accuracy, first.mismatch) == (4, 0.5, 1.02)


def test_so_many_at_once_as_the_sweep_says(tmp_path):
    plan = plan_of(tmp_path, parallel=3)
    training = Training(plan)
    tally, _ = start(plan, training)
    assert training.most == 3
    assert states(tally) == ["finished"] * 4


def test_started_again_it_takes_what_is_over_and_carries_on_the_rest(tmp_path):
    plan = plan_of(tmp_path)
    script = {
        CHILDREN[0]: [("finished", 4)],
        CHILDREN[1]: [("guard", 2)],
        CHILDREN[2]: [("sweep killed", 3)],
    }
    with pytest.raises(Killed):
        start(plan, Training(plan, script))
    training = Training(plan)
    tally, _ = start(plan, training)
    assert training.begun == CHILDREN[2:]
    assert states(tally) == ["finished", "stopped", "finished", "finished"]
    assert len(Run(tmp_path / CHILDREN[2]).attempts()) == 2
    assert _ends(tally).state == "finished"
    training = Training(plan)
    start(plan, training)
    assert training.begun == []


@pytest.mark.parametrize("how", ["failed", "killed", "no run"])
def test_a_failed_child_does_not_sink_the_sweep(tmp_path, how):
    plan = plan_of(tmp_path)
    training = Training(plan, {CHILDREN[1]: [(how, 2)]})
    tally, _ = start(plan, training)
    assert training.begun == CHILDREN
    assert tally.failed == [CHILDREN[1]]
    ends = _ends(tally)
    assert ends.state == "failed"
    assert ends.reason.startswith(f"1 of 4 children failed: {CHILDREN[1]}. {CHILDREN[1]}: ")
    # Started again it is carried on, and nothing else.
    training = Training(plan)
    tally, _ = start(plan, training)
    assert training.begun == [CHILDREN[1]]
    assert _ends(tally).state == "finished"


def test_a_failed_child_is_left_where_the_sweep_says_so(tmp_path):
    plan = plan_of(tmp_path, failures={"retry": False})
    start(plan, Training(plan, {CHILDREN[1]: [("failed", 2)]}))
    training = Training(plan)
    tally, _ = start(plan, training)
    assert training.begun == []
    assert _ends(tally).state == "failed"
    assert tally.failed == [CHILDREN[1]]


def test_so_many_failures_end_the_sweep(tmp_path):
    plan = plan_of(tmp_path, failures={"limit": 2})
    script = {name: [("failed", 1)] for name in CHILDREN[:2]}
    training = Training(plan, script)
    tally, _ = start(plan, training)
    assert training.begun == CHILDREN[:2]
    assert states(tally) == ["failed", "failed", "skipped", "skipped"]
    assert "2 children failed (failures.limit=2)" in tally.states[CHILDREN[3]].reason
    assert not (tmp_path / CHILDREN[2]).exists()


def test_a_cancelled_child_is_no_failure_and_the_sweep_says_that_it_is_open(tmp_path):
    plan = plan_of(tmp_path)
    tally, _ = start(plan, Training(plan, {CHILDREN[0]: [("cancelled", 1)]}))
    assert states(tally) == ["cancelled", "finished", "finished", "finished"]
    assert _ends(tally) == State("stopped", f"not finished: {CHILDREN[0]}")


def test_budget_of_iterations_is_never_passed_and_counts_what_was_done(tmp_path):
    plan = plan_of(tmp_path, budget={"iterations": 11})
    # Two of four fit; of one that fails, what it did not use is free again.
    tally, _ = start(plan, Training(plan, {CHILDREN[0]: [("failed", 2)]}))
    assert states(tally) == ["failed", "finished", "finished", "skipped"]
    assert tally.states[CHILDREN[3]].reason == ("budget: 4 iterations wanted, 1 of 11 are left")
    tally, _ = start(plan_of(tmp_path, budget={"iterations": 12}), training := Training(plan))
    assert training.begun == [CHILDREN[0]]
    assert _ends(tally).state == "stopped"
    assert "1 children were skipped" in _ends(tally).reason
    # With a greater budget it goes on.
    tally, _ = start(plan_of(tmp_path, budget={"iterations": 16}), training := Training(plan))
    assert training.begun == [CHILDREN[3]]
    assert _ends(tally).state == "finished"


def test_budget_holds_for_children_that_run_at_once(tmp_path):
    plan = plan_of(tmp_path, budget={"iterations": 8}, parallel=4)
    training = Training(plan)
    tally, _ = start(plan, training)
    assert sorted(training.begun) == CHILDREN[:2]
    assert tally.count("skipped") == 2


def test_budget_of_hours_counts_the_time_of_all_attempts(tmp_path):
    plan = plan_of(tmp_path, budget={"hours": 1.0})
    start(plan, Training(plan, {CHILDREN[0]: [("cancelled", 1)], CHILDREN[1]: [("no run", 0)] * 9}))
    run = Run(tmp_path / CHILDREN[2])
    number = run.attempts()[-1]["number"]
    run.update_attempt(number, started=run.attempts()[-1]["ended"] - 3601.0)
    tally, _ = start(plan, training := Training(plan))
    assert training.begun == []
    assert "budget: 1.00 of 1 hours are used up" in tally.states[CHILDREN[0]].reason
    assert states(tally) == ["skipped", "skipped", "finished", "finished"]


def test_a_child_that_runs_elsewhere_is_waited_for_and_not_begun_twice(tmp_path):
    plan = plan_of(tmp_path, seeds=[0])
    start(plan, Training(plan, {CHILDREN[0]: [("cancelled", 1)]}))
    run = Run(tmp_path / CHILDREN[0])
    training = Training(plan)
    told: list[str] = []
    (child,) = plan.loaded.children

    async def both() -> Tally:
        lock = RunLock(run.folder)
        attempt = run.begin_attempt(this_attempt())

        async def tell(tally: Tally) -> None:
            told.append(tally.states[child.name].state)
            if len(told) == 5:  # the other process ends
                run.end_attempt(attempt, State("finished"))
                lock.release()

        driving = Drive(
            plan.loaded.sweep,
            source_of(plan),
            look=lambda one: look(plan, one),
            launch=training.launch,
            tell=tell,
            poll_s=0.01,
        )
        return await driving.run()

    tally = asyncio.run(both())
    assert told[0] == "running"
    assert training.begun == []
    assert states(tally) == ["finished"]


# --- an Optuna study


def study_of(folder: Path, *overrides: str, trials: int = 6, seeds=(0,), **values) -> Plan:
    space = {
        "learner.lr": {"kind": "log", "low": 1e-5, "high": 1e-3},
        "rollout.samples": {"kind": "choice", "choices": [4, 8]},
    }
    study = {"space": space, "trials": trials}
    return plan_of(folder, *overrides, method="optuna", optuna=study, seeds=list(seeds), **values)


def nearer(recipe) -> float:
    """Greatest at lr=1e-4."""
    return 1.0 / (1.0 + abs(recipe.learner.lr - 1e-4) * 1e4)


def trials_of(plan: Plan) -> list[tuple[str, float | None, dict]]:
    import optuna

    found = optuna.load_study(study_name="s", storage=f"sqlite:///{plan.folder / 'study.db'}")
    return [(trial.state.name, trial.value, trial.params) for trial in found.trials]


def test_without_optuna_a_study_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    plan = study_of(tmp_path)
    with pytest.raises(RecipeError, match="pip install optuna==") as refused:
        source_of(plan)
    assert str(refused.value) == study.MISSING


def test_a_study_is_the_same_again_and_finds_the_best(tmp_path):
    pytest.importorskip("optuna")
    found = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        plan = study_of(folder, trials=4)
        tally, _ = start(plan, training := Training(plan, accuracy=nearer))
        assert training.begun == [f"s-bf16-s0-t{n:04d}" for n in range(4)]
        assert states(tally) == ["finished"] * 4
        found.append(trials_of(plan))
    assert json.dumps(found[0]) == json.dumps(found[1])
    assert all(state == "COMPLETE" for state, _, _ in found[0])
    lr = [params["learner.lr"] for _, _, params in found[0]]
    assert len(set(lr)) == 4
    best = source_of(plan).best()
    assert best["value"] == max(value for _, value, _ in found[0])


def test_a_study_that_is_killed_goes_on_as_if_it_had_not_been(tmp_path):
    optuna = pytest.importorskip("optuna")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    plan = study_of(whole)
    start(plan, Training(plan, accuracy=nearer))
    wanted = trials_of(plan)

    plan = study_of(broken)
    with pytest.raises(Killed):
        start(plan, Training(plan, {"s-bf16-s0-t0002": [("sweep killed", 2)]}, accuracy=nearer))
    # Killed while it asked for a trial, too: that one was never begun.
    half = optuna.load_study(study_name="s", storage=f"sqlite:///{plan.folder / 'study.db'}").ask()
    half.suggest_float("learner.lr", 1e-5, 1e-3, log=True)
    tally, _ = start(plan, training := Training(plan, accuracy=nearer))
    assert training.begun == [f"s-bf16-s0-t{n:04d}" for n in range(2, 6)]
    assert states(tally) == ["finished"] * 6
    told = trials_of(plan)
    assert told.pop(half.number)[0] == "FAIL"
    assert told == wanted
    assert len(Run(broken / "s-bf16-s0-t0002").attempts()) == 2


def test_a_trial_is_worth_the_mean_of_its_seeds_and_pruned_by_a_guard(tmp_path):
    pytest.importorskip("optuna")
    plan = study_of(tmp_path, trials=3, seeds=(0, 1))
    script = {"s-bf16-s1-t0001": [("guard", 2)], "s-bf16-s0-t0002": [("failed", 1)]}
    training = Training(plan, script, accuracy=lambda recipe: 0.25 + recipe.seed / 2)
    tally, _ = start(plan, training)
    assert len(training.begun) == 6
    assert [state for state, _, _ in trials_of(plan)] == ["COMPLETE", "PRUNED", "FAIL"]
    assert trials_of(plan)[0][1] == 0.5
    assert _ends(tally).state == "failed"
    # The failed child is carried on, and its trial counts then.
    tally, _ = start(plan, training := Training(plan, accuracy=lambda recipe: 0.75))
    assert training.begun == ["s-bf16-s0-t0002"]
    found = trials_of(plan)
    assert [state for state, _, _ in found] == ["COMPLETE", "PRUNED", "FAIL", "COMPLETE"]
    assert found[3][2] == found[2][2]
    assert _ends(tally).state == "finished"
    start(plan, training := Training(plan))
    assert training.begun == []
    assert trials_of(plan) == found


def test_a_study_asks_no_more_where_the_budget_is_used_up(tmp_path):
    pytest.importorskip("optuna")
    plan = study_of(tmp_path, budget={"iterations": 9})
    tally, _ = start(plan, training := Training(plan))
    assert training.begun == ["s-bf16-s0-t0000", "s-bf16-s0-t0001"]
    assert states(tally) == ["finished", "finished", "skipped"]
    assert tally.unmade == 3
    assert "4 children were skipped" in _ends(tally).reason
    plan = study_of(tmp_path, budget={"iterations": 100})
    tally, _ = start(plan, training := Training(plan))
    assert training.begun == [f"s-bf16-s0-t{n:04d}" for n in range(2, 6)]


def test_a_metric_that_the_children_do_not_have_fails_the_trial(tmp_path):
    pytest.importorskip("optuna")
    plan = study_of(tmp_path, "optuna.metric=val/nothing", trials=1)
    start(plan, Training(plan))
    assert [state for state, _, _ in trials_of(plan)] == ["FAIL"]
    (child,) = source_of(plan).known()
    assert metric_of(plan, child, ACCURACY) == dict.fromkeys(range(5), 0.5)


# --- a child's process


PARENT = """
import subprocess, sys
child = "import os, time; from flows.child import end_with; end_with(os.getppid());"
child += "print('up', flush=True); time.sleep(600)"
process = subprocess.Popen([sys.executable, "-c", child], stdout=-1, start_new_session=True)
process.stdout.readline()
print(process.pid, flush=True)
process.wait()
"""


def test_a_childs_process_is_told_to_end_where_the_sweep_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE)
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    parent.kill()
    parent.wait()
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_childs_process_that_comes_too_late_does_nothing():
    done = subprocess.run(
        [sys.executable, "-m", "flows.child", "1", "validate", str(TINY / "bf16.yaml")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert (done.stdout, done.stderr) == ("", "the sweep (process 1) is gone\n")
