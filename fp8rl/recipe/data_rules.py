"""Which choices of data go together; `rules.py` asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fp8rl.data.columns import SHIPPED
from fp8rl.recipe.data import Source, shares

if TYPE_CHECKING:
    from fp8rl.recipe.schema import Recipe, Task

Problem = tuple[tuple[str, ...], str]


def data_problems(recipe: Recipe) -> Iterator[Problem]:
    """Recipe keys at fault, and why, and what to do."""
    task = recipe.task
    given = [f"task.{key}" for key in ("name", "options") if getattr(task, key)]
    if task.sources and given:
        yield (
            (*given, "task.sources"),
            "both say where prompts come from. Leave one out; a generator is {name: ..., options: ...} "
            "in task.sources",
        )
    for place, sources in (("task.sources", task.sources), ("task.val.sources", task.val.sources)):
        for number, source in enumerate(sources):
            yield from _source(f"{place}[{number}]", source, chat=task.chat)
            if source in sources[:number]:
                yield (
                    (f"{place}[{number}]",),
                    "it stands there before. Leave it out, or change its weight",
                )
    yield from _train(task)
    yield from _val(task)
    if task.sources and recipe.model.is_tiny and recipe.warm_start.steps:
        yield (
            ("task.sources", "warm_start.steps"),
            "the warm start makes its corpus with the generator of task.name. Set warm_start.steps=0, "
            "or task.name instead of task.sources",
        )


def _source(key: str, source: Source, *, chat: bool) -> Iterator[Problem]:
    kinds = [kind for kind in ("name", "path", "hub") if getattr(source, kind) is not None]
    if len(kinds) != 1:
        said = " and ".join(kinds) or "none"
        yield (key,), f"a source has exactly one of name, path and hub; here: {said}"
        return
    kind = kinds[0]
    allowed = {
        "name": ("options",),
        "path": ("columns", "columns_of"),
        "hub": ("columns", "columns_of", "config", "split", "revision"),
    }
    for other in ("options", "columns", "columns_of", "config", "split", "revision"):
        if getattr(source, other) and other not in allowed[kind]:
            owner = " or ".join(of for of, keys in allowed.items() if other in keys)
            yield (f"{key}.{other}",), f"it belongs to a source with {owner}, and this has {kind}"
    if source.columns is not None and source.columns_of is not None:
        yield (f"{key}.columns", f"{key}.columns_of"), "one of them is enough. Leave the other out"
    if source.columns_of is not None and source.columns_of not in SHIPPED:
        yield (
            (f"{key}.columns_of",),
            f"no columns are shipped for {source.columns_of!r}; there are those of "
            f"{', '.join(sorted(SHIPPED))}. Say them under {key}.columns",
        )
    if source.columns is not None and source.columns.system is not None and not chat:
        yield (
            (f"{key}.columns.system", "task.chat"),
            "without a chat there is no system turn. Set task.chat=true",
        )


def _train(task: Task) -> Iterator[Problem]:
    weights = [source.weight for source in task.sources]
    if task.train_prompts is None:
        if not task.sources or any(source.is_generator for source in task.sources):
            yield ("task.train_prompts",), "a generator has no end, so null is not a number. Set one"
        if any(weight != 1.0 for weight in weights):
            yield (
                ("task.train_prompts", "task.sources"),
                "null takes every row of every source, so a weight has no effect. Set a number, or "
                "leave the weights out",
            )
    elif task.sources:
        for number, count in enumerate(shares(task.train_prompts, weights)):
            if count == 0:
                yield (
                    (f"task.sources[{number}].weight", "task.train_prompts"),
                    f"its share of {task.train_prompts} prompts is none. Raise one of them",
                )


def _val(task: Task) -> Iterator[Problem]:
    val = task.val
    keys = ("fraction", "split", "sources")
    said = [f"task.val.{key}" for key in keys if getattr(val, key)]
    if len(said) > 1:
        yield tuple(said), "each says where validation prompts come from. Leave all but one out"
    if val.fraction is not None and (not task.sources or any(s.is_generator for s in task.sources)):
        yield ("task.val.fraction",), "a generator has no rows to hold out. Set task.val_prompts alone"
    if val.split is not None and not (task.sources and all(s.hub is not None for s in task.sources)):
        yield ("task.val.split",), "only hub data sets have splits. Name task.val.sources"
    if val.split is not None and any((s.split or "train") == val.split for s in task.sources):
        yield (
            ("task.val.split", "task.sources"),
            "it is the split that training draws from. Name another, or set task.val.fraction",
        )
    if task.val_prompts is None:
        if not val.is_own:
            yield (
                ("task.val_prompts",),
                "null takes all that task.val holds, and it names nothing. Set a number, or task.val",
            )
        if any(source.is_generator for source in val.sources):
            yield ("task.val_prompts",), "a generator has no end, so null is not a number. Set one"
