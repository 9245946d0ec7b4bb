"""A sweep file, its children and its plan."""

import re
from datetime import date
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from flows.cli import app
from fp8rl.files import from_sealed
from fp8rl.preflight import require_runnable
from fp8rl.recipe.guard import Action
from fp8rl.recipe.load import load_recipe
from fp8rl.recipe.rules import RecipeError
from fp8rl.runs import RunExistsError
from fp8rl.sweep.check import checked_sweep
from fp8rl.sweep.expand import load_sweep, require_children_runnable
from fp8rl.sweep.plan import (
    PLAN,
    SweepChangedError,
    draft_plan,
    name_of_flow,
    open_plan,
    params_of,
    read_plan,
)
from tests.folders import make_run

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = CONFIGS / "tiny"


def write(folder: Path, name: str = "s", arms=("bf16",), **values) -> Path:
    arms = [str(TINY / f"{arm}.yaml") for arm in arms]
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"name": name, "arms": arms, "runs_dir": str(folder), **values}))
    return path


def names(path: Path, *overrides: str) -> list[str]:
    return [child.name for child in load_sweep(path, list(overrides)).children]


# --- its children


def test_grid_has_every_combination_for_every_arm_and_seed(tmp_path):
    axes = {"learner.lr": [1e-4, 2e-4], "rollout": {"samples": [4, 8]}}
    path = write(tmp_path, arms=("bf16", "fp8-e2e"), seeds=[0, 3], axes=axes)
    loaded = load_sweep(path)
    assert loaded.count == len(loaded.children) == 16
    assert [child.name for child in loaded.children][:3] == [
        "s-bf16-s0-lr0.0001-samples4",
        "s-bf16-s0-lr0.0001-samples8",
        "s-bf16-s0-lr0.0002-samples4",
    ]
    last = loaded.children[-1]
    assert last.name == "s-fp8-e2e-s3-lr0.0002-samples8"
    assert (last.arm, last.seed, last.values) == (
        *("fp8-e2e", 3),
        {"learner.lr": 2e-4, "rollout.samples": 8},
    )
    given = ["seed=3", "learner.lr=2e-4", "rollout.samples=8", f"name={last.name}"]
    assert last.recipe == load_recipe(TINY / "fp8-e2e.yaml", [*given, f"runs_dir={tmp_path}"]).recipe


def test_list_has_its_combinations_and_no_other(tmp_path):
    combinations = [{"learner.lr": 1e-4, "rollout.samples": 4}, {"learner": {"lr": 2e-4}}]
    path = write(tmp_path, method="list", combinations=combinations)
    assert names(path) == ["s-bf16-s0-lr0.0001-samples4", "s-bf16-s0-lr0.0002"]


def test_overrides_are_for_all_children_and_the_command_line_for_the_sweep(tmp_path):
    path = write(tmp_path, overrides={"iterations": 7, "task.options": {"digits": 4}})
    loaded = load_sweep(path, ["overrides.evaluate.every=3", "seeds=[1,2]"])
    assert [child.seed for child in loaded.children] == [1, 2]
    for child in loaded.children:
        assert (child.recipe.iterations, child.recipe.evaluate.every) == (7, 3)
        assert child.recipe.task.options == {"digits": 4}


def test_names_are_the_same_each_time_and_say_no_more_than_a_folder_can(tmp_path):
    axes = {"task.rewards": [[{"kind": "exact"}], [{"kind": "numeric"}]], "rollout.top_k": [-1, 5]}
    path = write(tmp_path, axes=axes)
    assert names(path) == names(path)
    assert len(set(names(path))) == 4
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name) for name in names(path))
    # Values whose text is too long for a name, or the same for two, are told apart by a digest.
    long = [["a" * 60, "b" * 60], ["a" * 60, "c" * 60]]
    (one, other) = names(write(tmp_path, axes={"precision.exclude": long}))
    assert one != other
    assert re.fullmatch(r"s-bf16-s0-[0-9a-f]{8}", one)
    (one, other) = names(write(tmp_path, axes={"precision.exclude": [["x.y"], ["x,y"]]}))
    assert one != other


def test_keys_that_end_alike_are_whole_in_names(tmp_path):
    path = write(tmp_path, axes={"learner.lr": [1e-4], "warm_start.lr": [1e-3]})
    assert names(path) == ["s-bf16-s0-learner.lr0.0001-warm_start.lr0.001"]


def test_date_in_the_name_is_the_day(tmp_path):
    path = write(tmp_path, name="nightly-{date}")
    (child,) = load_sweep(path, today=date(2026, 1, 31)).children
    assert child.name == "nightly-20260131-bf16-s0"


def test_experiment_may_have_the_sweeps_name_also_where_that_is_of_another_day(tmp_path):
    path = write(
        tmp_path, name="nightly-{date}", overrides={"tracking.experiment": "{name}", "iterations": 4}
    )
    (child,) = load_sweep(path, today=date(2026, 1, 31)).children
    assert child.recipe.tracking.experiment == "nightly-20260131"
    # As a retry on the next day says it.
    (child,) = load_sweep(path, ["name=nightly-20260131"], today=date(2026, 2, 1)).children
    assert child.recipe.tracking.experiment == "nightly-20260131"


def test_stop_when_has_the_childrens_guard_stop_them(tmp_path):
    for rule in ("kl", "kl > 0.1"):
        (child,) = load_sweep(write(tmp_path, stop_when=[rule])).children
        stopping = [r.name for r in child.recipe.guard.rules if Action.STOP in r.actions]
        assert stopping == ["kl > 0.1"]
    with pytest.raises(RecipeError, match=r"s-bf16-s0: stop_when: the guard has no rule 'kl > 9'"):
        load_sweep(write(tmp_path, stop_when=["kl > 9"]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"axes": {"learner.lrr": [1]}}, "unknown recipe key 'learner.lrr'; did you mean 'learner.lr'"),
        ({"axes": {"seed": [1, 2]}}, "seed: the sweep says that for each child"),
        ({"axes": {"learner.lr": [1e-4, 1e-4]}}, "axes.learner.lr: 0.0001 stands there twice"),
        ({"axes": {"learner.lr": []}}, "axes.learner.lr"),
        ({"seeds": [1, 1]}, "seeds: 1 stands there twice"),
        ({"method": "list"}, "combinations: method=list needs it"),
        ({"method": "optuna"}, "optuna: method=optuna needs it"),
        ({"combinations": [{"iterations": 2}]}, "that is for method=list, and this is method=grid"),
        (
            {"axes": {"iterations": [1]}, "overrides": {"iterations": 2}},
            "iterations: in overrides it is the same for all children",
        ),
        ({"budget": {"hous": 1}}, "unknown key 'budget.hous'; did you mean 'budget.hours'"),
        ({"axes": {"checkpoint.every": [5]}, "arms": []}, "arms"),
    ],
)
def test_a_bad_sweep_is_refused_by_key(tmp_path, values, message):
    path = write(tmp_path)
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | values))
    with pytest.raises(RecipeError) as refused:
        load_sweep(path)
    assert message in re.sub(r" \([^)]*\.yaml\)", "", str(refused.value))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"kind": "log", "low": 0.0, "high": 1.0}, "a logarithmic scale begins above 0"),
        ({"kind": "float", "low": 2.0, "high": 1.0}, "low 2 is not below high 1"),
        ({"kind": "int", "low": 1.5, "high": 4}, "whole numbers"),
        ({"kind": "choice"}, "a choice has choices"),
        ({"kind": "choice", "choices": [[1]]}, "choices are numbers, words"),
        ({"kind": "float", "low": 1.0}, "float has low and high"),
    ],
)
def test_a_bad_search_space_is_refused_by_key(tmp_path, space, message):
    study = {"space": {"learner.lr": space}, "trials": 2}
    path = write(tmp_path, arms=("bf16", "fp8-e2e"), method="optuna", optuna=study)
    with pytest.raises(RecipeError) as refused:
        load_sweep(path)
    assert "optuna.space.learner.lr: " in str(refused.value)
    assert message in str(refused.value)
    assert "an Optuna study is of one arm" in str(refused.value)


def test_children_that_are_the_same_are_refused(tmp_path):
    path = write(tmp_path, method="list", combinations=[{"iterations": 40}, {}])
    with pytest.raises(RecipeError, match="s-bf16-s0: the same recipe as s-bf16-s0-iterations40"):
        load_sweep(path)
    path = write(tmp_path, arms=("bf16",))
    other = tmp_path / "bf16.yaml"
    other.write_text(f"extends: {TINY / 'fp8-e2e.yaml'}\narm: bf16\n")
    values = yaml.safe_load(path.read_text())
    values["arms"].append(str(other))
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(RecipeError, match="s-bf16-s0: two children of this name"):
        load_sweep(path)


def test_every_childs_faults_are_told_at_once_by_name(tmp_path):
    arms = ("bf16", "fp8-e2e")
    axes = {"learner.lr": [1e-4, -1.0], "rollout.top_p": [1, 3]}
    with pytest.raises(RecipeError) as refused:
        load_sweep(write(tmp_path, arms=arms, axes=axes))
    for name in ("bf16-s0-lr-1.0-top_p1", "fp8-e2e-s0-lr0.0001-top_p3", "fp8-e2e-s0-lr-1.0-top_p3"):
        assert f"s-{name}" in str(refused.value)
    # What only a look at the whole recipe shows, too.
    loaded = load_sweep(write(tmp_path, arms=arms, axes={"rollout.max_new_tokens": [8, 500]}))
    with pytest.raises(RecipeError) as refused:
        require_children_runnable(loaded, require_runnable)
    assert "s-bf16-s0-max_new_tokens500, s-fp8-e2e-s0-max_new_tokens500: " in str(refused.value)
    assert "max_new_tokens8" not in str(refused.value)


def test_ends_of_a_search_space_are_tried_before_anything_starts(tmp_path):
    space = {
        "learner.lr": {"kind": "log", "low": 1e-5, "high": 1e-3},
        "rollout.max_new_tokens": {"kind": "int", "low": 4, "high": 500},
    }
    path = write(tmp_path, method="optuna", optuna={"space": space, "trials": 3}, seeds=[0, 1])
    loaded = load_sweep(path)
    assert loaded.count == 6
    with pytest.raises(RecipeError, match=r"learner.lr=1e-05, rollout.max_new_tokens=500"):
        require_children_runnable(loaded, require_runnable)


@pytest.mark.parametrize("path", sorted((CONFIGS / "sweeps").glob("*.yaml")), ids=lambda p: p.stem)
def test_sweeps_that_are_shipped_can_run(path, tmp_path):
    loaded, plan = checked_sweep(path, [f"runs_dir={tmp_path}"])
    assert loaded.children
    assert not plan.folder.exists()


def test_plan_is_shown_and_nothing_is_started(tmp_path):
    path = write(tmp_path, seeds=[0, 1], budget={"iterations": 50})
    shown = CliRunner().invoke(app, ["sweep", str(path), "--plan", "axes.learner.lr=[1e-4,2e-4]"])
    assert shown.exit_code == 0, shown.output
    for text in (
        *("s-bf16-s0-lr0.0001", "s-bf16-s1-lr0.0002", "learner.lr=0.0002", "waiting"),
        "4 children, 160 iterations; the budget of 50 iterations is too small for all of them",
    ):
        assert text in shown.output
    assert list(tmp_path.iterdir()) == [path]


def test_a_bad_sweep_is_exit_code_2(tmp_path):
    done = CliRunner().invoke(app, ["sweep", str(write(tmp_path)), "axes.learner.lr=[-1]"])
    assert done.exit_code == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "sweep.yaml"]


# --- its plan


def committed(path: Path, *overrides: str, flow_run: str = "flow-1"):
    return open_plan(load_sweep(path, list(overrides)), flow_run)


def test_plan_is_committed_once(tmp_path):
    path = write(tmp_path, axes={"learner.lr": [1e-4, 2e-4]})
    plan = committed(path)
    content = (plan.folder / PLAN).read_bytes()
    again = committed(path, flow_run="flow-2")
    assert (again.id, again.flow_run) == (plan.id, "flow-1")
    assert (plan.folder / PLAN).read_bytes() == content
    assert name_of_flow(tmp_path, "flow-1") == "s"
    assert name_of_flow(tmp_path, "flow-2") is None
    params = params_of(read_plan(plan.folder))
    assert params["axes.learner.lr"] == "[0.0001, 0.0002]"
    assert params["seeds"] == "[0]"


def test_another_plan_under_the_same_name_is_refused_with_the_differences(tmp_path):
    path = write(tmp_path, axes={"learner.lr": [1e-4, 2e-4]})
    plan = committed(path)
    content = (plan.folder / PLAN).read_bytes()
    with pytest.raises(SweepChangedError) as refused:
        committed(path, "axes.learner.lr=[1e-4, 3e-4]")
    for line in (
        "axes: {",
        "child s-bf16-s0-lr0.0002: it would be gone",
        "child s-bf16-s0-lr0.0003: it would be new",
        "Nothing was started",
    ):
        assert line in str(refused.value)
    with pytest.raises(SweepChangedError, match=r"child s-bf16-s0-lr0.0001: iterations: 40 -> 9"):
        committed(path, "overrides.iterations=9")
    assert (plan.folder / PLAN).read_bytes() == content


def test_an_arms_file_that_changed_is_another_plan(tmp_path):
    arm = tmp_path / "mine.yaml"
    arm.write_text(f"extends: {TINY / 'bf16.yaml'}\n")
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({"name": "s", "arms": ["mine.yaml"], "runs_dir": str(tmp_path)}))
    committed(path)
    arm.write_text(f"extends: {TINY / 'bf16.yaml'}\nlearner: {{lr: 3.0e-4}}\n")
    with pytest.raises(SweepChangedError, match=r"child s-mine-s0: learner.lr: 0.0001 -> 0.0003"):
        committed(path)


def test_policy_may_be_another_at_each_start(tmp_path):
    path = write(tmp_path, budget={"iterations": 4})
    plan = committed(path)
    again = committed(path, "budget.iterations=400", "failures.limit=null", "parallel=2")
    assert again.id == plan.id
    assert again.loaded.sweep.budget.iterations == 400


def test_a_damaged_plan_is_named(tmp_path):
    path = write(tmp_path)
    plan = committed(path)
    file = plan.folder / PLAN
    file.write_bytes(file.read_bytes().replace(b'"s-bf16-s0"', b'"s-bf16-s1"'))
    with pytest.raises(ValueError, match="damaged"):
        from_sealed(file.read_bytes())
    with pytest.raises(RecipeError, match=r"sweep.json is damaged"):
        committed(path)


def test_a_run_that_is_not_of_the_sweep_is_left_alone(tmp_path):
    path = write(tmp_path)
    make_run(tmp_path, "s-bf16-s0", until=(0, "prepare_data"), saved=())
    with pytest.raises(RunExistsError, match="That run is not of this sweep"):
        draft_plan(load_sweep(path))
    assert not (tmp_path / "sweeps").exists()


def test_children_whose_tracking_differs_are_refused(tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(f"extends: {TINY / 'fp8-e2e.yaml'}\ntracking: {{experiment: elsewhere}}\n")
    path = write(tmp_path)
    values = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(values | {"arms": [*values["arms"], str(other)]}))
    with pytest.raises(RecipeError, match="children's tracking differs"):
        checked_sweep(path, [])
    checked_sweep(path, ["overrides.tracking.experiment=both"])
