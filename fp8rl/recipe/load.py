"""Reads a recipe: YAML with `extends:`, dotted overrides, and where each value came from.

extends: base.yaml          # a path beside this file; read first, this file on top
precision: {rollout: fp8}
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Recipe

# The task's own options replace those of a base, so that another task starts clean.
_REPLACED = "task.options"
# The task is said in one of two ways; a file that says it in one drops the other's of its base.
_INSTEAD = {"sources": ("name", "options"), "name": ("sources",)}
# What the runs folder holds besides runs.
_RESERVED = ("compare", "demo", "mlartifacts", "mlflow.db", "numerics", "sweeps")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, its file, and the file (or the command line) that set each dotted key."""

    recipe: Recipe
    path: Path
    origins: dict[str, str]

    def origin(self, key: str) -> str:
        """Where the value of `key` came from; "default" where nothing set it."""
        while key not in self.origins and "." in key:
            key = key.rpartition(".")[0]  # a mapping such as task.options is set as a whole
        return self.origins.get(key, "default")


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars (`off` is a word, `1e-4` a number), and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"{node.start_mark}: the key {key!r} stands there twice")
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(?:\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def load_recipe(
    path: str | Path, overrides: list[str] | None = None, said_by: str = "command line"
) -> LoadedRecipe:
    """Reads the recipe at `path`, applies `overrides` ("key.sub=value") and validates it.

    said_by: where the overrides stand, for messages. Raises RecipeError with every unknown key (and
    the nearest known one) and every bad value.
    """
    path = Path(path)
    values, origins = read_values(path, overrides or [], said_by)
    values.setdefault("arm", path.stem)
    return LoadedRecipe(_validated(values, origins, path), path, origins)


def read_values(
    path: Path, overrides: list[str], said_by: str = "command line"
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a YAML file with `extends` and `overrides`, not validated, and where each came
    from; raises RecipeError for what cannot be read."""
    values, origins = _read(path, ())
    for text in overrides:
        _override(values, origins, text, said_by)
    return values, origins


def validated(values: dict[str, Any], model: type[Model], origins: dict[str, str], path: Path) -> Model:
    """`values` as a `model`; raises RecipeError with every unknown key and every bad value."""
    problems = list(_unknown_keys(values, model, "", origins))
    if problems:
        raise RecipeError(f"{path}: " + "\n".join(problems))
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise RecipeError(_explain(error, path, origins)) from None


def _validated(values: dict[str, Any], origins: dict[str, str], path: Path) -> Recipe:
    recipe = validated(values, Recipe, origins, path)
    if recipe.name is not None:
        check_name(recipe.name)
    return recipe


def with_overrides(recipe: Recipe, overrides: list[str]) -> Recipe:
    """`recipe` with `overrides` ("key.sub=value") applied; raises RecipeError as `load_recipe`."""
    values = recipe.model_dump(mode="json")
    origins: dict[str, str] = {}
    for text in overrides:
        _override(values, origins, text)
    return _validated(values, origins, Path("recipe"))


def changes(old: Recipe, new: Recipe) -> dict[str, tuple[str, str]]:
    """{dotted key: (old, new)} of the values that differ, as text."""
    before, after = flatten(old), flatten(new)
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return {key: (before.get(key, "nothing"), after.get(key, "nothing")) for key in keys}


def check_name(name: str) -> None:
    """Raises RecipeError unless `name` can name a folder and an MLflow run."""
    if not _NAME.fullmatch(name):
        raise RecipeError(
            f"name: {name!r} cannot name a run; use letters, digits, '.', '_' and '-', up to 100, "
            "beginning with a letter or digit"
        )
    if name in _RESERVED:
        raise RecipeError(f"name: {name!r} is kept for other things in the runs folder; choose another")


def _read(path: Path, seen: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    if path.resolve() in seen:
        chain = " -> ".join(str(p) for p in (*seen, path.resolve()))
        raise RecipeError(f"extends goes in a circle: {chain}")
    try:
        content = _yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        by = f" (named by extends in {seen[-1]})" if seen else ""
        raise RecipeError(f"no recipe at {path}{by}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"{path}: not readable as YAML: {error}") from None
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys to values")
    base: dict[str, Any] = {}
    origins: dict[str, str] = {}
    parent = content.pop("extends", None)
    if parent is not None:
        if not isinstance(parent, str):
            raise RecipeError(f"{path}: extends names one file, not {parent!r}")
        base, origins = _read(path.parent / parent, (*seen, path.resolve()))
    _merge(base, content, origins, str(path), "")
    return base, origins


def _merge(
    base: dict[str, Any], new: dict[str, Any], origins: dict[str, str], origin: str, prefix: str
) -> None:
    for key, others in _INSTEAD.items() if prefix == "task." else ():
        for other in others:
            if new.get(key) and other not in new:
                base.pop(other, None)
                origins.pop(f"{prefix}{other}", None)
    for key, value in new.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and dotted != _REPLACED:
            if not isinstance(base.get(key), dict):
                base[key] = {}
            _merge(base[key], value, origins, origin, f"{dotted}.")
        else:
            base[key] = value
            origins[dotted] = origin


def _override(
    values: dict[str, Any], origins: dict[str, str], text: str, said_by: str = "command line"
) -> None:
    dotted, separator, raw = text.partition("=")
    if not separator or not dotted:
        raise RecipeError(f"override {text!r}: write it as key=value, for example iterations=2")
    try:
        value = _yaml(raw)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {text!r}: the value is not readable: {error}") from None
    nested: Any = value
    for key in reversed(dotted.split(".")):
        nested = {key: nested}
    _merge(values, nested, origins, said_by, "")


def _section(annotation: Any) -> type[BaseModel] | None:
    # A list or mapping of them is one value, such as correction.reject.
    if get_origin(annotation) in (tuple, dict):
        return None
    candidates = [annotation, *get_args(annotation)]
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def dotted_keys(model: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    """Every key of a recipe, dotted."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        keys += dotted_keys(section, f"{prefix}{name}.") if section else [f"{prefix}{name}"]
    return keys


def _unknown_keys(
    values: dict[str, Any], model: type[BaseModel], prefix: str, origins: dict[str, str]
) -> list[str]:
    problems = []
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        field = model.model_fields.get(str(key))
        if field is None:
            problems.append(_unknown(dotted, model, prefix, origins))
            continue
        section = _section(field.annotation)
        if section and isinstance(value, dict):
            problems += _unknown_keys(value, section, f"{dotted}.", origins)
    return problems


def _unknown(dotted: str, model: type[BaseModel], prefix: str, origins: dict[str, str]) -> str:
    siblings = [f"{prefix}{name}" for name in model.model_fields]
    hint = _hint(dotted, siblings) or f"; known here: {', '.join(siblings)}"
    where = f" ({origins[dotted]})" if dotted in origins else ""
    return f"unknown key {dotted!r}{where}{hint}"


def _hint(dotted: str, siblings: list[str]) -> str:
    near = difflib.get_close_matches(dotted, siblings, n=1, cutoff=0.6)
    if not near:
        # Right name, wrong place: `lr` for `learner.lr`.
        last = dotted.rsplit(".", 1)[-1]
        by_last = {key.rsplit(".", 1)[-1]: key for key in reversed(dotted_keys())}
        near = [by_last[name] for name in difflib.get_close_matches(last, by_last, n=1)]
    return f"; did you mean {near[0]!r}?" if near else ""


def by_recipe_key(values: dict[str, Any]) -> dict[str, Any]:
    """{dotted recipe key: value} of `values`, whose keys may be dotted or nested. Keys that no recipe
    has stay, for `unknown_recipe_keys` to name."""
    sections = {key.rpartition(".")[0] for key in dotted_keys()}
    sections |= {part.rpartition(".")[0] for part in sections}

    def walk(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            dotted = f"{prefix}{key}"
            if isinstance(value, dict) and dotted in sections:
                yield from walk(value, f"{dotted}.")
            else:
                yield dotted, value

    return dict(walk(values, ""))


def unknown_recipe_keys(keys: Iterable[str]) -> Iterator[str]:
    """A message for each of `keys` that is not a value of a recipe, dotted."""
    known = dotted_keys()
    for key in keys:
        if key not in known and not key.startswith("task.options."):
            yield f"unknown recipe key {key!r}{_hint(key, known)}"


def _explain(error: ValidationError, path: Path, origins: dict[str, str]) -> str:
    lines = []
    for item in error.errors():
        dotted = ".".join(str(part) for part in item["loc"])
        origin = origins.get(dotted, str(path))
        lines.append(f"{dotted}: {item['msg']} (got {item['input']!r}, from {origin})")
    return f"{path}: " + "\n".join(lines)


def flatten(recipe: Recipe) -> dict[str, str]:
    """Every value of the recipe by dotted key, as text: MLflow's params."""
    flat: dict[str, str] = {}

    def walk(values: dict[str, Any], prefix: str) -> None:
        for key, value in values.items():
            if isinstance(value, dict) and value:
                walk(value, f"{prefix}{key}.")
            else:
                text = isinstance(value, str)
                flat[f"{prefix}{key}"] = value if text else json.dumps(value)

    walk(recipe.model_dump(mode="json"), "")
    return flat


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe as YAML that `load_recipe` reads back."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
