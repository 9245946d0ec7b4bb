"""Draws a task's prompts from its sources: shares, order, filters, and counts of what is left out."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from fp8rl.data.pool import Drops, Pool, load_pool
from fp8rl.data.tasks import make_generator, require_scorable
from fp8rl.recipe.data import Named, TooLong, shares, train_sources, val_sources
from fp8rl.recipe.rules import RecipeError
from fp8rl.recipe.schema import Extract, Task
from fp8rl.reward.extract import extract

# Train and validation draw from seeds far apart: many generators seed item i with seed + i. So do the
# generators of one task.
_VAL_SEED = 1_000_000_007
_SOURCE_SEED = 15_485_863
# How many more items to look at, per prompt wanted, before saying that a generator has too few.
_DRAWS = 20
_IN_VAL, _REPEATED = "questions that are validation prompts", "repeated question"

Row = dict[str, Any]
# A row, and where it stands.
Stream = Iterator[tuple[Row, str]]


@dataclass(frozen=True)
class Length:
    """of: the tokens of a question and its system turn. limit: of a prompt, in tokens."""

    of: Callable[[str, str | None], list[int]]
    limit: int


@dataclass
class Prompts:
    """Rows of each split (id, question, answer, entry; prompt_tokens where a length was asked for), and
    for each source what was read, taken and left out, as docs/data.md tells.
    """

    train: list[Row]
    val: list[Row]
    sources: list[dict[str, Any]]


@dataclass
class _Stock:
    """A source and what becomes of it. looked_at: rows or items so far. longest: of the prompts that
    were too long, in tokens."""

    named: Named
    number: int
    pool: Pool | None
    order: list[int]
    drops: Drops = field(default_factory=Drops)
    taken: dict[str, int] = field(default_factory=lambda: {"train": 0, "val": 0})
    looked_at: int = 0
    longest: int = 0

    def rows(self, order: list[int]) -> Stream:
        assert self.pool is not None
        for row in self.pool.take(order):
            self.looked_at += 1
            entry = {"question": row["question"], "answer": row["answer"], "source": self.named.label}
            if row["id"] is not None:
                entry["id"] = row["id"]
            yield {**row, "entry": json.dumps(entry)}, row["where"]

    def items(self, task: Task, seed: int, count: int) -> Stream:
        named, size = self.named, count * _DRAWS
        seed += self.number * _SOURCE_SEED
        generator = make_generator(named.source, seed=seed, size=size, key=named.key)
        require_scorable(task, generator, named.source.name, named.key)
        for index in range(size):
            item = generator[index]
            self.looked_at += 1
            entry = item if named.label is None else {**item, "source": named.label}
            row = {"question": item["question"], "answer": str(item["answer"])}
            yield {**row, "system": None, "entry": json.dumps(entry)}, f"{named.title}, item {index}"

    def report(self) -> dict[str, Any]:
        told: dict[str, Any] = {"source": self.named.title}
        dropped = self.drops.reasons
        if self.pool is None:
            told["items"] = self.looked_at
        else:
            told |= {**self.pool.origin, "rows": self.pool.read}
            told["not_used"] = len(self.pool.rows) - self.looked_at
            dropped = self.pool.drops.reasons | dropped
        if self.longest:
            told["longest_dropped_tokens"] = self.longest
        return {**told, **self.taken, "dropped": dropped}


def draw_prompts(
    task: Task, seed: int, length: Length | None = None, scratch: Path | None = None
) -> Prompts:
    """The train and validation prompts of `task`: the same for the same data, recipe and seed.

    length: filters by it, where task.too_long says so. scratch: folder for files that are deleted at
    the end; None: the system's.
    Raises RecipeError as `load_pool` and `make_generator`, and where a source has too few prompts.
    """
    folder = Path(tempfile.mkdtemp(prefix="fp8rl-sources-", dir=scratch))
    try:
        return _Draw(task, seed, length, folder).all()
    finally:
        shutil.rmtree(folder)


def columns_of(rows: list[Row]) -> dict[str, list[Any]]:
    """Columns id (from 0), question, answer and entry, and prompt_tokens where rows have them."""
    names = ["question", "answer", "entry"]
    if rows and "prompt_tokens" in rows[0]:
        names.append("prompt_tokens")
    return {"id": list(range(len(rows))), **{name: [row[name] for row in rows] for name in names}}


class _Draw:
    def __init__(self, task: Task, seed: int, length: Length | None, folder: Path) -> None:
        self.task, self.seed, self.length, self.folder = task, seed, length, folder
        self.val_questions: set[str] = set()
        self.questions: set[str] = set()

    def all(self) -> Prompts:
        task, val = self.task, self.task.val
        stocks = [self._stock(i, one, "train") for i, one in enumerate(train_sources(task))]
        own = [self._stock(i, one, "val") for i, one in enumerate(val_sources(task))]
        # Where validation has no rows of its own, both splits go on with the same stream.
        held = [round(len(s.order) * (val.fraction or 0.0)) for s in stocks]
        train = [s.rows(s.order[n:]) for s, n in zip(stocks, held, strict=True)]
        if own:
            val_streams = [s.rows(s.order) for s in own]
        elif val.fraction is not None:
            val_streams = [s.rows(s.order[:n]) for s, n in zip(stocks, held, strict=True)]
        else:
            val_streams = train
        val_rows = self._split("val", own or stocks, val_streams)
        train_rows = self._split("train", stocks, train)
        return Prompts(train_rows, val_rows, [stock.report() for stock in [*stocks, *own]])

    def _stock(self, number: int, named: Named, split: str) -> _Stock:
        if named.source.is_generator:
            return _Stock(named, number, None, [])
        scratch = self.folder / f"{split}-{number}.arrow"
        pool = load_pool(
            named.source, named.title, named.key, scratch, lambda answer: is_usable(self.task, answer)
        )
        order = list(range(len(pool.rows)))
        Random(f"{self.seed}/{split} source/{number}").shuffle(order)
        return _Stock(named, number, pool, order)

    def _split(self, split: str, stocks: list[_Stock], streams: list[Stream]) -> list[Row]:
        task = self.task
        wanted = task.train_prompts if split == "train" else task.val_prompts
        weights = [stock.named.source.weight for stock in stocks]
        counts = [None] * len(stocks) if wanted is None else shares(wanted, weights)
        found: list[Row] = []
        for stock, stream, count in zip(stocks, streams, counts, strict=True):
            if count != 0:
                found += self._take(split, stock, stream, count)
        if not found:
            names = ", ".join(stock.named.title for stock in stocks)
            other = "" if split == "val" else f"; {len(self.val_questions)} are validation prompts"
            raise RecipeError(
                f"task.{split}_prompts: no prompt of {names} is left. Left out: {_told(stocks)}"
                f"{other}. Name more data, or ask for fewer validation prompts"
            )
        return found

    def _take(self, split: str, stock: _Stock, stream: Stream, count: int | None) -> list[Row]:
        if stock.pool is None:
            assert count is not None  # the rules see to it
            seed = self.seed + (_VAL_SEED if split == "val" else 0)
            stream = stock.items(self.task, seed, count)
        rows: list[Row] = []
        for row, where in stream:
            if (why := self._known(row["question"], split)) is not None:
                stock.drops.add(why, where)
                continue
            if not self._fits(row, stock, where):
                continue
            self.questions.add(row["question"])
            if split == "val":
                self.val_questions.add(row["question"])
            rows.append(row)
            stock.taken[split] += 1
            if len(rows) == count:
                break
        if count is not None and len(rows) < count:
            raise RecipeError(self._too_few(split, stock, len(rows), count))
        return rows

    def _known(self, question: str, split: str) -> str | None:
        """Why a question is not drawn again; None where it is new."""
        if split == "train" and question in self.val_questions:
            return _IN_VAL
        return _REPEATED if question in self.questions else None

    def _fits(self, row: Row, stock: _Stock, where: str) -> bool:
        """Adds the prompt's tokens to `row`."""
        if self.length is None:
            return True
        row["prompt_tokens"] = self.length.of(row["question"], row["system"])
        tokens, limit = len(row["prompt_tokens"]), self.length.limit
        if tokens <= limit or self.task.too_long is TooLong.ERROR:
            return True
        stock.drops.add(f"prompts of more than {limit} tokens", where)
        stock.longest = max(stock.longest, tokens)
        return False

    def _too_few(self, split: str, stock: _Stock, found: int, count: int) -> str:
        key, title = f"task.{split}_prompts", stock.named.title
        if stock.pool is None:
            long = f" ({stock.longest} tokens the longest that was left out)" if stock.longest else ""
            return (
                f"{key}: {title} gave only {found} different questions of the {count} wanted{long}; "
                "ask for fewer, or set options that make more"
            )
        other = f"; {stock.taken['val']} are validation prompts" if split == "train" else ""
        share = "" if len(train_sources(self.task)) == 1 else ", its share by weight"
        return (
            f"{key}: {title} has only {found} prompts of the {count} wanted{share}. Of its "
            f"{stock.pool.read} rows are left out: {_told([stock])}{other}. Ask for fewer, or for null "
            "(all), or name more data"
        )


def _told(stocks: list[_Stock]) -> str:
    drops = [drops for s in stocks for drops in (s.pool and s.pool.drops, s.drops) if drops]
    return ", ".join(str(one) for one in drops if one.reasons) or "none"


def is_usable(task: Task, answer: str) -> bool:
    """Whether a completion that says a reference answer can be scored as right: where a reward sees
    what task.extract takes, that must still be the answer."""
    if not any(verifier.sees_extract for verifier in task.rewards):
        return True
    found = extract(task.extract, answer)
    return found is not None and found.strip() == (
        answer.strip() if task.extract is Extract.WHOLE else answer.strip().replace(",", "")
    )
