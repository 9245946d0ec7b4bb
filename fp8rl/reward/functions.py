"""Reward functions of the user's: found below task.reward_path only, by name, and told by digest."""

import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8rl.files import sha256
from fp8rl.recipe.reward import FunctionVerifier
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Task

ARGUMENTS = ("question", "completion", "answer", "entry")
_SIGNATURE = "def score(question: str, completion: str, answer: str, entry: dict) -> float"

_loaded: dict[str, ModuleType] = {}


@dataclass(frozen=True)
class FunctionSource:
    """A reward function and the content of its module's file, which is what is run. folder: that of
    task.reward_path in which the file lies. key: of the recipe."""

    key: str
    module: str
    function: str
    file: Path
    folder: Path
    content: bytes

    @property
    def digest(self) -> str:
        return sha256(self.content)


def function_sources(task: Task) -> dict[str, FunctionSource]:
    """{module:function: its source} of every reward of kind function. Imports nothing.

    Raises RecipeError naming the key where a folder is missing, or no file below the folders of
    task.reward_path (links followed) is the module.
    """
    return {
        verifier.function: _find(task, f"task.rewards.{index}.function", verifier.function)
        for index, verifier in enumerate(task.rewards)
        if isinstance(verifier, FunctionVerifier)
    }


def _find(task: Task, key: str, name: str) -> FunctionSource:
    module, _, function = name.partition(":")
    for text in task.reward_path:
        folder = Path(text).resolve()
        if not folder.is_dir():
            raise RecipeError(f"task.reward_path: no folder {text!r} ({folder})")
        file = folder.joinpath(*module.split(".")).with_suffix(".py").resolve()
        if not file.is_relative_to(folder):
            raise RecipeError(
                f"{key}: {name} is {file}, which lies outside of {folder}. Only what lies in a folder "
                "of task.reward_path is run: copy it there, or add its folder"
            )
        if file.is_file():
            return FunctionSource(key, module, function, file, folder, file.read_bytes())
    places = ", ".join(str(Path(text).resolve()) for text in task.reward_path)
    raise RecipeError(
        f"{key}: no module {module} in task.reward_path ({places}). Nothing else is imported: put "
        f"{module.replace('.', '/')}.py there"
    )


def function_digests(task: Task) -> dict[str, str]:
    """{module:function: sha256 of its module's file}, for a step to name what it comes from."""
    return {name: source.digest for name, source in function_sources(task).items()}


class _Content(importlib.abc.SourceLoader):
    """Loads a module from given bytes: no other file than the one with that digest, no stale .pyc."""

    def __init__(self, source: FunctionSource) -> None:
        self._source = source

    def get_filename(self, fullname: str) -> str:
        return str(self._source.file)

    def get_data(self, path: str | bytes) -> bytes:
        return self._source.content


def load_function(source: FunctionSource) -> Callable[..., Any]:
    """Runs the module and returns its function. For a worker process: it runs the user's code.

    Modules beside it can be imported by it. Raises ValueError naming what is missing where the module
    cannot be run, has no such function, or it does not take the four arguments by name.
    """
    name = f"{source.module}:{source.function}"
    module = _loaded.get(source.module) or _load(source)
    function = getattr(module, source.function, None)
    if not callable(function):
        there = sorted(k for k, v in vars(module).items() if inspect.isfunction(v))
        raise ValueError(
            f"{source.file} has no function {source.function}; it has {', '.join(there) or 'none'}"
        )
    _require_signature(name, function)
    return function


def _load(source: FunctionSource) -> ModuleType:
    if source.module in sys.modules:
        raise ValueError(f"a module named {source.module} is there already; rename {source.file}")
    if str(source.folder) not in sys.path:
        sys.path.append(str(source.folder))
    loader = _Content(source)
    module = importlib.util.module_from_spec(ModuleSpec(source.module, loader, origin=str(source.file)))
    module.__file__ = str(source.file)
    sys.modules[source.module] = module
    try:
        loader.exec_module(module)
    except BaseException as error:  # SystemExit among them
        raise ValueError(f"{source.file} cannot be imported: {type(error).__name__}: {error}") from None
    _loaded[source.module] = module
    return module


def _require_signature(name: str, function: Callable[..., Any]) -> None:
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{name} is an async function, which is not awaited. Make it: {_SIGNATURE}")
    parameters = inspect.signature(function).parameters.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = {p.name for p in parameters if p.kind in by_name}
    rest = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    missing = [] if rest else [arg for arg in ARGUMENTS if arg not in taken]
    unknown = [
        p.name
        for p in parameters
        if p.default is inspect.Parameter.empty
        and p.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        and (p.name not in ARGUMENTS or p.kind is inspect.Parameter.POSITIONAL_ONLY)
    ]
    if missing or unknown:
        parts = [f"does not take {', '.join(missing)}"] if missing else []
        parts += [f"asks for {', '.join(unknown)}, which it is not given"] if unknown else []
        raise ValueError(f"{name} {' and '.join(parts)}. Make it: {_SIGNATURE}")
