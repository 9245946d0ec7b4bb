"""The usable rows of a source, checked once and kept as an Arrow file that `datasets` maps into memory.

One pass over the files: what is in them never stands in memory as a whole, only 16 bytes and some for
each different question, by which repeated ones are found.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8rl.data.columns import (
    SHIPPED,
    BadValue,
    Sample,
    Unusable,
    columns_for,
    sample,
    top_level,
    wanted,
)
from fp8rl.data.records import Rows, files_of, read_file, read_hub
from fp8rl.files import file_sha256
from fp8rl.recipe.data import Columns, Source
from fp8rl.recipe.rules import RecipeError

if TYPE_CHECKING:
    from datasets import Dataset

_FLUSH_ROWS, _FLUSH_CHARACTERS = 1000, 2**24
_READ = 256


@dataclass
class Drops:
    """Rows left out: for each reason how many, and where the first was."""

    reasons: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, reason: str, where: str) -> None:
        known = self.reasons.setdefault(reason, {"rows": 0, "first": where})
        known["rows"] += 1

    @property
    def total(self) -> int:
        return sum(known["rows"] for known in self.reasons.values())

    def __str__(self) -> str:
        told = (f"{v['rows']} {reason} (first: {v['first']})" for reason, v in self.reasons.items())
        return ", ".join(told)


@dataclass
class Pool:
    """rows: question, answer, system, id, where of each usable row. read: rows there were. origin: what
    identifies the content, {"files": {path: sha256}} or {"hub": ...}.
    """

    source: Source
    label: str
    key: str
    rows: "Dataset"
    read: int
    drops: Drops
    origin: dict[str, Any]

    def take(self, order: list[int]) -> Iterator[dict[str, Any]]:
        """The rows of `order`, read as they are asked for."""
        for start in range(0, len(order), _READ):
            part = self.rows[order[start : start + _READ]]
            for i in range(len(part["question"])):
                yield {name: values[i] for name, values in part.items()}


def load_pool(
    source: Source, label: str, key: str, scratch: Path, usable: Callable[[str], bool]
) -> Pool:
    """Reads and checks all of a file or hub source; its usable rows go to the new file `scratch`.

    label: its name in the data. key: its recipe key, "task.sources[0]". usable: whether an answer can
    be scored. Rows are left out, and counted, whose question or answer is missing, empty or not to be
    kept as text, whose answer is not usable, and whose question was there before.
    Raises RecipeError naming key, file and row for a file that is not what it is called, a column that
    is missing, a value of a wrong type, an id that was there before, and where no row is left.
    """
    from datasets import Dataset

    columns = columns_for(source)
    check = _Check(columns, key, usable)
    origin: dict[str, Any] = {"files": {}}
    parts: list[tuple[str, Rows]] = []
    if source.hub is not None:
        shipped = SHIPPED.get(source.hub)
        config = source.config or (shipped.config if shipped else None)
        rows, origin = read_hub(source, config, key, _choose(columns, key, source.hub))
        parts.append((source.hub, rows))
    for path in local_files(source, key):
        origin["files"][str(path)] = file_sha256(path)
        parts.append((str(path), read_file(path, f"{key}.path", _choose(columns, key, str(path)))))
    with _Writer(scratch) as writer:
        for where, rows in parts:
            before = check.read
            for number, row in rows:
                if (one := check(row, where, number)) is not None:
                    writer.add(one, _place(where, number))
            if check.read == before:
                raise RecipeError(_NO_ROWS.format(key, where))
    if check.read == check.drops.total:
        raise RecipeError(f"{key}: none of the {check.read} rows of {label} can be used: {check.drops}")
    table = Dataset.from_file(str(scratch))
    return Pool(source, label, key, table, check.read, check.drops, origin)


def require_readable(source: Source, key: str) -> None:
    """Looks at the first row of each local file of a source; raises RecipeError as `load_pool`."""
    columns = columns_for(source)
    check = _Check(columns, key, lambda _: True)
    for path in local_files(source, key):
        rows = read_file(path, f"{key}.path", _choose(columns, key, str(path)))
        first = next(rows, None)
        if first is None:
            raise RecipeError(_NO_ROWS.format(key, path))
        check(first[1], str(path), first[0])


def local_files(source: Source, key: str) -> list[Path]:
    """The files of a source with a path; none of another. Raises RecipeError as `files_of`."""
    return [] if source.path is None else files_of(Path(source.path), f"{key}.path")


_NO_ROWS = "{}: {} has no rows. Leave it out, or write rows to it"


def _place(where: str, number: int) -> str:
    return f"{where}, row {number}"


def _choose(columns: Columns, key: str, where: str) -> Callable[[list[str]], list[str]]:
    """Which of a table's columns to read; raises RecipeError where one is missing."""

    def choose(names: list[str]) -> list[str]:
        chosen = []
        for which, column in wanted(columns).items():
            name = top_level(column, names)
            if name is None:
                raise RecipeError(
                    f"{key}.columns.{which}: {where} has no column {column!r}; it has "
                    f"{', '.join(map(repr, names[:20])) or 'none'}. Name the one that holds the {which}"
                )
            chosen.append(name)
        return list(dict.fromkeys(chosen))

    return choose


class _Check:
    """Makes samples of rows, and counts those that are left out. read: rows so far."""

    def __init__(self, columns: Columns, key: str, usable: Callable[[str], bool]) -> None:
        self.columns, self.key, self.usable = columns, key, usable
        self.drops, self.read = Drops(), 0
        self._where = ""
        self._ids: dict[str, str] = {}
        self._answers: dict[bytes, bytes] = {}  # by question, digests of both

    def __call__(self, row: dict[str, Any], where: str, number: int) -> Sample | None:
        place = _place(where, number)
        self.read += 1
        if where != self._where:  # in later rows a key that is not there is a null
            self._where = where
            _choose(self.columns, self.key, where)(list(row))
        try:
            one = sample(row, self.columns)
        except BadValue as error:
            raise RecipeError(
                f"{self.key}.columns: {place}, column {error.column!r}: {error}. Mend or delete the "
                "row, or name another column"
            ) from None
        except Unusable as error:
            self.drops.add(str(error), place)
            return None
        if one.id is not None and (first := self._ids.setdefault(one.id, place)) != place:
            raise RecipeError(
                f"{self.key}.columns.id: {place} has the id {one.id[:100]!r}, which {first} has too. "
                "Give each row an id of its own, or leave columns.id out"
            )
        if not self.usable(one.answer):
            self.drops.add("answers that task.extract does not leave as they are", place)
            return None
        answer = _digest(one.answer)
        known = self._answers.setdefault(_digest(one.question), answer)
        if known is not answer:
            another = "" if known == answer else ", with another answer"
            self.drops.add(f"repeated question{another}", place)
            return None
        return one


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class _Writer:
    """Writes samples to an Arrow file in the format that `datasets` maps."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        names = ("question", "answer", "system", "id", "where")
        self.schema = pa.schema([(name, pa.string()) for name in names])
        self.path = path
        self._rows: list[tuple[str | None, ...]] = []
        self._characters = 0

    def __enter__(self) -> "_Writer":
        import pyarrow as pa

        self._file = self.path.open("wb")
        self._stream = pa.ipc.new_stream(self._file, self.schema)
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._stream.close()
        self._file.close()

    def add(self, one: Sample, where: str) -> None:
        self._rows.append((one.question, one.answer, one.system, one.id, where))
        self._characters += len(one.question) + len(one.answer)
        if len(self._rows) >= _FLUSH_ROWS or self._characters >= _FLUSH_CHARACTERS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._rows:
            columns = [pa.array(values, pa.string()) for values in zip(*self._rows, strict=True)]
            self._stream.write_batch(pa.record_batch(columns, schema=self.schema))
        self._rows, self._characters = [], 0
