"""The forms that Prefect makes of the flows: every field has a text, choices and bounds."""

import subprocess
import sys

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate

from flows.asked import asked_name, asked_recipe, asked_runs, recipe_files
from flows.compare import compare
from flows.deploying import deployment_names
from flows.resuming import resume
from flows.sweep import sweep
from flows.training import train
from fp8rl.recipe.load import load_recipe
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Recipe

FP8 = "configs/tiny/fp8-e2e-kv.yaml"


@pytest.fixture(scope="module")
def form():
    return parameter_schema(train.fn).model_dump()


def fields(form):
    """{Section.field: its schema} of the whole recipe."""
    sections = {name: one for name, one in form["definitions"].items() if "properties" in one}
    return {
        f"{section}.{key}": value
        for section, one in sections.items()
        for key, value in one["properties"].items()
    }


def test_few_fields_come_first_and_the_whole_recipe_last(form):
    by_position = sorted(form["properties"], key=lambda key: form["properties"][key]["position"])
    assert by_position == ["recipe_file", "overrides", "runs_dir", "resume", "recipe"]
    assert form["required"] == []
    asked = parameter_schema(resume.fn).model_dump()
    assert list(asked["properties"]) == ["run", "overrides", "runs_dir"]
    assert asked["required"] == ["run"]


@pytest.mark.parametrize("flow", [train, resume, sweep, compare], ids=lambda flow: flow.name)
def test_every_field_is_told_and_takes_its_value_without_a_choice_of_types(flow):
    for name, field in parameter_schema(flow.fn).model_dump()["properties"].items():
        assert field["description"].strip(), name
        assert "anyOf" not in field, name  # Prefect shows "str" and "None" there, and no field


def test_the_title_of_a_value_is_the_key_that_changes_it(form):
    found = fields(form)
    assert found["Precision.kv_cache"]["title"] == "kv_cache"
    assert {name.partition(".")[2]: field.get("title") for name, field in found.items()} == {
        key: key for key in (name.partition(".")[2] for name in found)
    }


def test_recipe_files_are_choices_and_load(form):
    empty, *choices = form["properties"]["recipe_file"]["enum"]
    assert empty == ""
    assert choices == recipe_files()
    assert FP8 in choices
    assert "infra/up.yaml" not in choices
    for choice in recipe_files():
        assert load_recipe(choice).recipe.iterations > 0


def test_every_value_of_a_recipe_has_a_text(form):
    found = fields(form)
    assert len(found) > 150
    without = [name for name, field in found.items() if not field.get("description", "").strip()]
    assert without == []


def test_every_choice_is_a_choice_and_every_bound_is_there(form):
    found, definitions = fields(form), form["definitions"]

    def reached(field):
        return definitions[field["$ref"].rpartition("/")[2]]

    assert reached(found["Precision.rollout"])["enum"] == ["bf16", "fp8"]
    assert reached(found["Learner.loss"])["enum"] == ["clipped", "gspo", "cispo", "reinforce"]
    assert reached(found["Checkpoint.mode"])["enum"] == ["max", "min"]
    assert found["Recipe.iterations"]["exclusiveMinimum"] == 0
    assert found["Rollout.top_p"]["maximum"] == 1
    assert found["Precision.kv_margin"] | {"minimum": 1, "maximum": 2} == found["Precision.kv_margin"]
    assert form["properties"]["recipe"]["default"] == Recipe().model_dump(mode="json")
    # A number without a bound is one that may have any value.
    free = {
        name
        for name, field in found.items()
        if field.get("type") in ("integer", "number")
        and not {"minimum", "exclusiveMinimum", "maximum"} & field.keys()
    }
    assert free == set()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"recipe_file": FP8, "overrides": ["iterations=2"], "resume": ""},
        {"recipe_file": "", "recipe": {"iterations": 2}},
        {"recipe_file": FP8, "recipe": Recipe().model_dump(mode="json")},
    ],
)
def test_the_server_takes_what_a_form_sends(form, given):
    validate(given, form, raise_on_error=True, ignore_required=True)


@pytest.mark.parametrize(
    "given",
    [
        {"recipe_file": "configs/none.yaml"},
        {"recipe": {"iterations": 0}},
        {"recipe": {"iteration": 1}},
        {"recipe": {"precision": {"rollout": "fp4"}}},
        {"overrides": "iterations=2"},
    ],
)
def test_the_server_refuses_before_anything_starts(form, given):
    with pytest.raises(ValidationError):
        validate(given, form, raise_on_error=True)


def test_a_file_with_changes_is_the_recipe_of_the_command_line():
    overrides = ["iterations=7", "name=x"]
    assert asked_recipe(FP8, overrides, None, Recipe()) == load_recipe(FP8, overrides).recipe
    assert asked_recipe(None, None, "", Recipe(seed=3)) == Recipe(seed=3)
    assert asked_recipe("", ["seed=4"], None, Recipe(seed=3)).seed == 4


def test_the_runs_folder_is_the_most_explicit_one():
    assert asked_recipe(FP8, None, None, Recipe()).runs_dir == "runs"
    assert asked_recipe(FP8, None, None, Recipe(runs_dir="a")).runs_dir == "a"
    assert asked_recipe(FP8, None, "b", Recipe(runs_dir="a")).runs_dir == "b"
    assert asked_recipe(FP8, ["runs_dir=c"], "b", Recipe(runs_dir="a")).runs_dir == "c"


def test_values_that_would_be_lost_are_refused():
    with pytest.raises(RecipeError, match=r"learner\.lr, seed"):
        asked_recipe(FP8, None, None, Recipe(seed=3, learner={"lr": 1.0}))


def test_the_runs_folder_and_name_follow_from_the_parameters_of_a_flow_run(tmp_path):
    where = str(tmp_path)
    for parameters, name in (
        ({"recipe": {"runs_dir": where, "name": "a"}}, "a"),
        ({"recipe_file": FP8, "overrides": ["name=b"], "runs_dir": where}, "b"),
        ({"recipe_file": FP8, "overrides": [f"runs_dir={where}", "seed=1"]}, "fp8-e2e-kv"),
        ({"resume": "c", "recipe": Recipe(runs_dir=where)}, "c"),
        ({"run": "d", "runs_dir": where}, "d"),
    ):
        assert asked_runs(parameters) == tmp_path, parameters
        assert asked_name(parameters) == name
    assert asked_runs({}).name == "runs"
    with pytest.raises(RecipeError, match="no recipe at"):
        asked_runs({"recipe_file": str(tmp_path / "gone.yaml")})


def test_the_deployments_are_flows_of_this_package():
    names = ["train/train", "resume/resume", "compare/compare", "sweep/sweep"]
    assert deployment_names() == names
    assert (train.name, resume.name) == ("train", "resume")
    for one in (train, resume):  # what a killed run leaves is put right
        assert [hook.__name__ for hook in one.on_crashed_hooks] == ["put_right_after"]
        assert [hook.__name__ for hook in one.on_cancellation_hooks] == ["put_right_after"]


def test_what_is_asked_is_known_without_torch():
    code = "import sys, flows.asked; assert not {'torch', 'prefect'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
