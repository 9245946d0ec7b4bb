"""Tasks by name: reasoning-gym's generators and ours, as `datasets` of prompts."""

import json
from dataclasses import fields
from functools import cache
from random import Random
from typing import TYPE_CHECKING

import reasoning_gym.factory as gym
from reasoning_gym.dataset import ProceduralDataset

from fp8rl.data import reverse_digits as rd
from fp8rl.recipe.data import Source
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Task
from fp8rl.reward.extract import extract

if TYPE_CHECKING:
    from datasets import Dataset


@cache
def _register() -> None:
    if rd.DATASET_NAME not in gym.DATASETS:
        gym.register_dataset(rd.DATASET_NAME, rd.ReverseDigitsDataset, rd.ReverseDigitsConfig)


def make_generator(
    task: Task | Source, *, seed: int, size: int, key: str = "task"
) -> ProceduralDataset:
    """The generator that `task`, at the recipe's `key`, names.

    Raises RecipeError for an unknown name or option, or an option value that the generator refuses.
    """
    _, config_cls = _registered(task.name, key)
    known = {field.name for field in fields(config_cls)} - {"seed", "size"}
    unknown = sorted(set(task.options) - known)
    if unknown:
        raise RecipeError(
            f"{key}.options: {task.name} has no option {', '.join(unknown)}; "
            f"it has {', '.join(sorted(known)) or 'none'}"
        )
    try:
        return gym.create_dataset(task.name, seed=seed, size=size, **task.options)
    except (AssertionError, ValueError, TypeError) as error:
        raise RecipeError(f"{key}.options: {task.name} refuses {task.options}: {error}") from None


def _registered(name: str | None, key: str) -> tuple[type[ProceduralDataset], type]:
    """The classes of a generator and of its options. Raises RecipeError for an unknown name."""
    import reasoning_gym  # noqa: F401  registers its own tasks

    _register()
    if name not in gym.DATASETS:
        from difflib import get_close_matches

        near = get_close_matches(str(name), gym.DATASETS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "see reasoning-gym for the names"
        raise RecipeError(f"{key}.name: no task {name!r}; {hint}")
    return gym.DATASETS[name]


def compares_text(name: str | None, key: str = "task") -> bool:
    """Whether the scorer of a generator only compares text, in time linear in it: that of
    reasoning-gym's base class, or ours. Scorers of its tasks' own parse, compute and `eval` what a
    completion says; those that do not are not told apart. Raises RecipeError for an unknown name.
    """
    generator, _ = _registered(name, key)
    own = (ProceduralDataset.score_answer, rd.ReverseDigitsDataset.score_answer)
    return generator.score_answer in own


def build_prompts(task: Task, seed: int) -> "tuple[Dataset, Dataset]":
    """(train, validation) prompts, without duplicates and without a question in both.

    Columns: id, question, answer, entry (the item as JSON, for its scorer). Raises RecipeError as
    `draw_prompts`.
    """
    from datasets import Dataset

    from fp8rl.data.draw import columns_of, draw_prompts  # which makes generators with what is here

    drawn = draw_prompts(task, seed)
    return Dataset.from_dict(columns_of(drawn.train)), Dataset.from_dict(columns_of(drawn.val))


def require_scorable(
    task: Task, generator: ProceduralDataset, name: str | None = None, key: str = "task"
) -> None:
    """Items are kept as JSON; a scorer that no longer knows its own answer then is found here.

    name, key: of the generator, where it is not that of task.name.
    """
    name = name or task.name
    entry = generator[0]
    if not isinstance(entry["answer"], str):
        raise RecipeError(f"{key}.name: {name} gives no text as its answer, which a prompt needs")
    sees_extract = any(verifier.sees_extract for verifier in task.rewards)
    answer = extract(task.extract, entry["answer"]) if sees_extract else entry["answer"]
    try:
        kept = json.loads(json.dumps(entry))
        before = generator.score_answer(entry["answer"], entry)
        after = generator.score_answer(entry["answer"], kept)
        extracted = None if answer is None else generator.score_answer(answer, entry)
    except Exception as error:
        raise RecipeError(f"{key}.name: {name} cannot be scored from JSON: {error}") from None
    if before != after:
        raise RecipeError(
            f"{key}.name: {name} scores its own answer {after}, not {before}, once its item has "
            "been JSON; it is not supported"
        )
    if extracted != before:
        raise RecipeError(
            f"task.extract: {task.extract} makes {answer!r} of {name}'s own answer "
            f"{entry['answer']!r}, which no longer scores as right; set task.extract=whole"
        )


def prompts_of_batch(total: int, count: int, batch: int, seed: int) -> list[int]:
    """Ids of the `count` prompts of `batch` (from 0) out of `total`, all different.

    A function of its arguments alone: every epoch is a shuffle of its own, and the rest of an epoch
    that does not fill a batch is left out. Which batches an iteration draws is in cursor.py.
    """
    per_epoch = total // count
    epoch, place = divmod(batch, per_epoch)
    order = list(range(total))
    Random(f"{seed}/{epoch}").shuffle(order)
    return order[place * count : (place + 1) * count]
