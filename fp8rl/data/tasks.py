"""Tasks by name: reasoning-gym's generators and ours, as `datasets` of prompts."""

import json
from dataclasses import fields
from functools import cache
from random import Random
from typing import TYPE_CHECKING, Any

import reasoning_gym.factory as gym
from reasoning_gym.dataset import ProceduralDataset

from fp8rl.data import reverse_digits as rd
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Task
from fp8rl.reward.extract import extract

if TYPE_CHECKING:
    from datasets import Dataset

# Train and validation draw from seeds far apart: many generators seed item i with seed + i.
_VAL_SEED = 1_000_000_007
# How many more items to look at, per prompt wanted, before saying that a task has too few.
_DRAWS = 20


@cache
def _register() -> None:
    if rd.DATASET_NAME not in gym.DATASETS:
        gym.register_dataset(rd.DATASET_NAME, rd.ReverseDigitsDataset, rd.ReverseDigitsConfig)


def make_generator(task: Task, *, seed: int, size: int) -> ProceduralDataset:
    """The generator that `task` names.

    Raises RecipeError for an unknown name or option, or an option value that the generator refuses.
    """
    import reasoning_gym  # noqa: F401  registers its own tasks

    _register()
    if task.name not in gym.DATASETS:
        from difflib import get_close_matches

        near = get_close_matches(task.name, gym.DATASETS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "see reasoning-gym for the names"
        raise RecipeError(f"task.name: no task {task.name!r}; {hint}")
    _, config_cls = gym.DATASETS[task.name]
    known = {field.name for field in fields(config_cls)} - {"seed", "size"}
    unknown = sorted(set(task.options) - known)
    if unknown:
        raise RecipeError(
            f"task.options: {task.name} has no option {', '.join(unknown)}; "
            f"it has {', '.join(sorted(known)) or 'none'}"
        )
    try:
        return gym.create_dataset(task.name, seed=seed, size=size, **task.options)
    except (AssertionError, ValueError, TypeError) as error:
        raise RecipeError(f"task.options: {task.name} refuses {task.options}: {error}") from None


def build_prompts(task: Task, seed: int) -> "tuple[Dataset, Dataset]":
    """(train, validation) prompts, without duplicates and without a question in both.

    Columns: id, question, answer, entry (the generator's whole item as JSON, for its scorer).
    Raises RecipeError where the task cannot give that many different questions.
    """
    from datasets import Dataset

    taken: set[str] = set()
    val = _draw(task, seed + _VAL_SEED, task.val_prompts, taken, "val_prompts")
    train = _draw(task, seed, task.train_prompts, taken, "train_prompts")
    return Dataset.from_list(train), Dataset.from_list(val)


def _draw(task: Task, seed: int, count: int, taken: set[str], key: str) -> list[dict[str, Any]]:
    generator = make_generator(task, seed=seed, size=count * _DRAWS)
    require_scorable(task, generator)
    rows: list[dict[str, Any]] = []
    for index in range(count * _DRAWS):
        entry = generator[index]
        if entry["question"] in taken:
            continue
        taken.add(entry["question"])
        rows.append(
            {
                "id": len(rows),
                "question": entry["question"],
                "answer": str(entry["answer"]),
                "entry": json.dumps(entry),
            }
        )
        if len(rows) == count:
            return rows
    raise RecipeError(
        f"task.{key}: {task.name} gave only {len(rows)} different questions of the {count} wanted; "
        "ask for fewer, or set options that make more"
    )


def require_scorable(task: Task, generator: ProceduralDataset) -> None:
    """Items are kept as JSON; a scorer that no longer knows its own answer then is found here."""
    entry = generator[0]
    if not isinstance(entry["answer"], str):
        raise RecipeError(f"task.name: {task.name} gives no text as its answer, which a prompt needs")
    answer = extract(task.extract, entry["answer"])
    try:
        kept = json.loads(json.dumps(entry))
        before = generator.score_answer(entry["answer"], entry)
        after = generator.score_answer(entry["answer"], kept)
        extracted = None if answer is None else generator.score_answer(answer, entry)
    except Exception as error:
        raise RecipeError(f"task.name: {task.name} cannot be scored from JSON: {error}") from None
    if before != after:
        raise RecipeError(
            f"task.name: {task.name} scores its own answer {after}, not {before}, once its item has "
            "been JSON; it is not supported"
        )
    if extracted != before:
        raise RecipeError(
            f"task.extract: {task.extract} makes {answer!r} of {task.name}'s own answer "
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
