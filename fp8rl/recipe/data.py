"""The recipe's choices of data: where prompts come from. What is done with them: docs/data.md."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from fp8rl.recipe.base import PositiveFloat, Section

if TYPE_CHECKING:
    from fp8rl.recipe.schema import Task

Name = Annotated[str, Field(min_length=1)]


class TooLong(StrEnum):
    ERROR = "error"  # the data are refused
    DROP = "drop"  # the prompt is left out, and counted


class Columns(Section):
    """Which columns of a file hold what. A dot goes into a struct: reward_model.ground_truth."""

    question: Name = "question"
    """Text, or a list of chat turns: one of the user, and before it perhaps one of the system."""
    answer: Name = "answer"
    """Text or a number."""
    id: Name | None = None
    """Text or an integer, no value twice in a source. Empty: rows have no id of their own."""
    system: Name | None = None
    """The row's own system turn, instead of task.system. Where it is null, task.system stands."""
    answer_after: Name | None = None
    """The answer is what stands after the last of these, such as "####". Empty: all of it."""


class Source(Section):
    """Prompts of one origin: exactly one of name, path and hub."""

    name: Name | None = None
    """A generator, as task.name."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the generator."""
    path: Name | None = None
    """A file (.jsonl, .json, .parquet, .arrow), or a folder of such."""
    hub: Name | None = None
    """A data set of the Hugging Face hub. With HF_HUB_OFFLINE set: of its cache on this machine."""
    config: Name | None = None
    """Configuration of the hub's data set. Empty: that of its shipped columns, or its only one."""
    split: Name | None = None
    """Split of the hub's data set. Empty: train."""
    revision: Name | None = None
    """Of the hub's data set: a commit, which pins it, or a tag or branch. Empty: as it is now."""
    columns: Columns | None = None
    """Empty: the columns shipped for the hub's data set, else question and answer."""
    columns_of: Name | None = None
    """Instead of columns: those shipped for this hub data set. For a local copy of it."""
    weight: PositiveFloat = 1.0
    """Share of the prompts, relative to the other sources' weights."""

    @property
    def is_generator(self) -> bool:
        return self.name is not None

    @property
    def title(self) -> str:
        """What to call it: its name without folders."""
        return self.name or self.hub or Path(self.path or "").name


class Val(Section):
    """Where validation prompts come from: at most one of these. Empty: task.val_prompts of the same
    sources, by their weights, before any train prompt is drawn."""

    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """So much of each file or hub data set is held out; validation prompts are taken from that."""
    split: Name | None = None
    """This split of each hub data set."""
    sources: tuple[Source, ...] = ()
    """Sources of their own."""

    @property
    def is_own(self) -> bool:
        """Whether there is a stock of validation rows that training does not touch."""
        return self.fraction is not None or self.split is not None or bool(self.sources)


@dataclass(frozen=True)
class Named:
    """A source with its recipe key, and the label that entries of its prompts carry as "source". No
    label: the generator of task.name, whose entries are as it makes them.
    """

    key: str
    label: str | None
    source: Source

    @property
    def title(self) -> str:
        return self.label or self.source.title


def train_sources(task: Task) -> list[Named]:
    """The sources of train prompts, and of validation prompts where nothing else is said."""
    if not task.sources:
        return [Named("task", None, Source(name=task.name, options=task.options))]
    return _named("task.sources", task.sources, set())


def val_sources(task: Task) -> list[Named]:
    """The sources that validation prompts have of their own; empty where they have none."""
    taken = {one.label for one in train_sources(task) if one.label is not None}
    if task.val.split is not None:
        update = {"split": task.val.split}
        return _named("task.sources", [s.model_copy(update=update) for s in task.sources], taken)
    return _named("task.val.sources", task.val.sources, taken)


def all_sources(task: Task) -> list[Named]:
    """The sources of train prompts, then those that validation has of its own."""
    return [*train_sources(task), *val_sources(task)]


def with_absolute_paths(task: Task) -> Task:
    """`task` with the paths of its files whole: other processes have another working directory."""

    def whole(source: Source) -> Source:
        if source.path is None:
            return source
        return source.model_copy(update={"path": str(Path(source.path).absolute())})

    val = task.val.model_copy(update={"sources": tuple(map(whole, task.val.sources))})
    return task.model_copy(update={"sources": tuple(map(whole, task.sources)), "val": val})


def _named(place: str, sources: Iterable[Source], taken: set[str]) -> list[Named]:
    """Labels that no other source has, nor `taken`."""
    found: list[Named] = []
    for number, source in enumerate(sources):
        label, count = source.title, 1
        while label in taken:
            count += 1
            label = f"{source.title}#{count}"
        taken.add(label)
        found.append(Named(f"{place}[{number}]", label, source))
    return found


def shares(total: int, weights: list[float]) -> list[int]:
    """`total` things divided by `weights`: whole numbers by largest remainders, earlier ones first."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(value) for value in exact]
    by_rest = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_rest[: total - sum(counts)]:
        counts[i] += 1
    return counts
