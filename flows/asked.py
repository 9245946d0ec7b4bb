"""What is asked of the `train` and `resume` flows, by a person in Prefect's form or by a program.

Prefect makes its forms from the flows' signatures: the types here give a field its kind and choices,
and the flow's docstring (Args) its text.
"""

import json
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import WithJsonSchema

from fp8rl.recipe.load import changes, load_recipe, with_overrides
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Recipe

ROOT = Path(__file__).parents[1]


@cache
def recipe_files() -> list[str]:
    """The recipes under configs/, as paths from the repository's root: all of its YAML files whose keys
    are a recipe's.
    """
    known = {*Recipe.model_fields, "extends"}
    found = []
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        try:
            keys = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            continue  # whoever runs it is told
        if isinstance(keys, dict) and set(keys) <= known:
            found.append(str(path.relative_to(ROOT)))
    return found


# For the form, a field left empty is "" or []. Of a type that may be null it would show two buttons,
# "str" and "None", and the field itself only after a click.
RecipeFile = Annotated[str | None, WithJsonSchema({"type": "string", "enum": ["", *recipe_files()]})]
Overrides = Annotated[list[str] | None, WithJsonSchema({"type": "array", "items": {"type": "string"}})]
OptionalText = Annotated[str | None, WithJsonSchema({"type": "string"})]


def asked_recipe(
    recipe_file: str | None, overrides: list[str] | None, runs_dir: str | None, recipe: Recipe
) -> Recipe:
    """The recipe that the four fields mean: the file's or `recipe`, with the overrides on top.

    runs_dir stands above that of file and recipe, and below that of the overrides. Raises RecipeError
    where the file is not one, or `recipe` has values beside it that would be lost.
    """
    overrides = overrides or []
    place = [] if not runs_dir else [f"runs_dir={json.dumps(runs_dir)}"]
    if not recipe_file:
        return with_overrides(recipe, [*place, *overrides]) if place or overrides else recipe
    lost = changes(Recipe(runs_dir=recipe.runs_dir), recipe)
    if lost:
        raise RecipeError(
            f"recipe_file is {recipe_file}, and the whole recipe has values of its own ("
            f"{', '.join(sorted(lost))}). Leave the recipe file empty, or put these values into the "
            "changes as key=value"
        )
    if recipe.runs_dir != Recipe().runs_dir and not place:
        place = [f"runs_dir={json.dumps(recipe.runs_dir)}"]
    return load_recipe(recipe_file, [*place, *overrides]).recipe


def asked_runs(parameters: dict[str, Any]) -> Path:
    """The runs folder that a flow run's parameters mean. Raises RecipeError as `asked_recipe`."""
    recipe = parameters.get("recipe") or {}
    if isinstance(recipe, dict):
        recipe = Recipe(runs_dir=recipe.get("runs_dir", Recipe().runs_dir))
    else:
        recipe = Recipe(runs_dir=recipe.runs_dir)
    where = parameters.get("runs_dir")
    if parameters.get("run") or parameters.get("resume"):
        return Path(where or recipe.runs_dir).resolve()
    said = [one for one in parameters.get("overrides") or [] if one.startswith("runs_dir=")]
    file = parameters.get("recipe_file")
    return Path(asked_recipe(file, said, where, recipe).runs_dir).resolve()


def asked_name(parameters: dict[str, Any]) -> str:
    """What to call a flow run with these parameters in Prefect."""
    recipe = parameters.get("recipe") or {}
    values = recipe if isinstance(recipe, dict) else recipe.model_dump()
    said = [one for one in parameters.get("overrides") or [] if one.startswith("name=")]
    named = said[-1].partition("=")[2] if said else None
    file = parameters.get("recipe_file")
    stem = Path(file).stem if file else None
    resumed = parameters.get("run") or parameters.get("resume")
    return resumed or named or values.get("name") or stem or values.get("arm") or "train"
