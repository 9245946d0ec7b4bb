"""Rows of local files and of hub data sets, one at a time or a few thousand, never a whole file."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fp8rl.recipe.data import Source
from fp8rl.recipe.rules import RecipeError

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
MAX_LINE = 64 * 2**20
"""Bytes of one line of JSON. More is no row, and would only fill the memory."""
MAX_JSON = 512 * 2**20
"""Bytes of a file that is one JSON array, which is read as a whole."""
_BATCH = 1000
_COMMIT = re.compile(r"[0-9a-f]{40}")

# Which of a table's columns to read; raises where one that is wanted is not among them.
Choose = Callable[[list[str]], list[str]]
# (row, values); rows count from 1, in a .jsonl file they are its lines.
Rows = Iterator[tuple[int, dict[str, Any]]]


def files_of(path: Path, key: str) -> list[Path]:
    """The file `path`, or the files of the folder `path` in order of their names; others in it, and
    folders, are no data. Raises RecipeError naming `key` where there is none.
    """
    endings = ", ".join(SUFFIXES)
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES and p.is_file())
        found = [p for p in found if not p.name.startswith(".")]
        if not found:
            raise RecipeError(f"{key}: the folder {path} has no file that ends in {endings}")
        return found
    if not path.is_file():
        raise RecipeError(
            f"{key}: there is no file or folder {path}; paths are relative to {Path.cwd()}"
        )
    if path.suffix not in SUFFIXES:
        raise RecipeError(f"{key}: {path} ends in none of {endings}; convert it to one of them")
    return [path]


def read_file(path: Path, key: str, choose: Choose) -> Rows:
    """The rows of a file, by its ending; tables with the columns that `choose` takes only.

    Raises RecipeError naming key, file and row where it cannot be read as what it is called.
    """
    try:
        if path.stat().st_size == 0:
            raise RecipeError(f"{key}: {path} is empty. Leave it out, or write rows to it")
        if path.suffix == ".parquet":
            yield from _batches(_parquet(path, choose), f"{key}: {path}")
        elif path.suffix == ".arrow":
            yield from _batches(_arrow(path, choose), f"{key}: {path}")
        elif path.suffix == ".json" and _begins_array(path):
            yield from _array(path, key)
        else:
            yield from _lines(path, key)
    except RecipeError:
        raise
    except MemoryError:
        raise RecipeError(f"{key}: {path} needs more memory than there is to be read") from None
    except OSError as error:
        if error.errno is None:  # pyarrow's, of a damaged file
            raise _damaged(path, key, error) from None
        raise RecipeError(f"{key}: {path} is not readable: {error.strerror}") from None
    except _table_errors() as error:
        raise _damaged(path, key, error) from None


def read_hub(
    source: Source, config: str | None, key: str, choose: Choose
) -> tuple[Rows, dict[str, Any]]:
    """The rows of a hub data set, and what identifies them: their number, fingerprint and, where
    `datasets` tells it, the commit.

    Raises RecipeError where it cannot be loaded, or is not of the source's revision.
    """
    import datasets

    name, split = str(source.hub), source.split or "train"
    if Path(name).exists():  # load_dataset would take that instead, without a word
        raise RecipeError(f"{key}.hub: {name} is a folder or file here. Name it as {key}.path")
    wanted = None if source.revision is None else _commit(name, source.revision, key)
    try:
        table = datasets.load_dataset(name, config, split=split, revision=wanted)
    except Exception as error:  # of many libraries, and of the data set itself
        what = f"{name} ({config or 'default'}, split {split})"
        told = _first_line(error)
        if is_offline():
            raise RecipeError(
                f"{key}.hub: {what} could not be loaded: {told}. HF_HUB_OFFLINE is set, so only the "
                "cache of this machine was looked into. Load it once without HF_HUB_OFFLINE, or name a "
                f"local copy: path, with columns_of: {name}"
            ) from None
        raise RecipeError(f"{key}.hub: {what} could not be loaded: {told}") from None
    commit = _loaded_commit(table)
    if wanted not in (None, commit):  # where the hub does not answer `datasets` takes what it has
        raise RecipeError(
            f"{key}.revision: {name} is to be of commit {wanted}, and what `datasets` found in the "
            f"cache of this machine is of commit {commit or 'unknown'}. Load it once with the hub in "
            "reach, or name another revision"
        )
    table = table.select_columns(choose(table.column_names))
    about = {"rows": len(table), "fingerprint": table._fingerprint}
    about |= {} if commit is None else {"commit": commit}
    return _batches(table.with_format("arrow").iter(_BATCH), f"{key}: {name}"), {"hub": about}


def _commit(name: str, revision: str, key: str) -> str:
    """The commit that `revision` of a hub data set is. Raises RecipeError where it cannot be told."""
    if _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(name, revision=revision).sha)
    except Exception as error:
        raise RecipeError(
            f"{key}.revision: which commit {revision!r} of {name} is, the hub does not say: "
            f"{_first_line(error)}. Name the commit itself, its 40 digits"
        ) from None


def _loaded_commit(table: Any) -> str | None:
    """The commit of a hub data set: the name of the folder in which `datasets` keeps its files."""
    names = {Path(file["filename"]).parent.name for file in table.cache_files}
    name = names.pop() if len(names) == 1 else ""
    return name if _COMMIT.fullmatch(name) else None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def is_offline() -> bool:
    """Whether the hub must not be asked."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _damaged(path: Path, key: str, error: Exception) -> RecipeError:
    kind = {".parquet": "Parquet", ".arrow": "Arrow"}.get(path.suffix, "JSON")
    return RecipeError(
        f"{key}: {path} is not readable as {kind}: {_first_line(error)}. Write it again, or name "
        "another"
    )


def _table_errors() -> tuple[type[Exception], ...]:
    """What pyarrow raises of a damaged file."""
    import pyarrow as pa

    return (pa.ArrowException, ValueError, OverflowError)


def _begins_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands there twice")
    return values


def _parsed(content: bytes, where: str) -> Any:
    """Raises RecipeError beginning with `where`."""
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        wrong = content[error.start]
        why = f"byte {error.start + 1} ({wrong:#04x}) is no UTF-8. Save the file as UTF-8"
    except json.JSONDecodeError as error:
        at = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}"
        why = f"broken JSON: {error.msg} (at {at}). Mend or delete it"
    except RecursionError:
        why = "JSON nested too deeply. Mend or delete it"
    except ValueError as error:  # a key twice, an integer of thousands of digits
        why = f"broken JSON: {error}. Mend or delete it"
    raise RecipeError(f"{where}: {why}")


def _lines(path: Path, key: str) -> Rows:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            where = f"{key}: {path}, row {number}"
            if len(line) > MAX_LINE:
                raise RecipeError(
                    f"{where}: the line is longer than {MAX_LINE >> 20} MiB. Write one row in each line"
                )
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            row = _parsed(line, where)
            if not isinstance(row, dict):
                raise RecipeError(f"{where}: a row is a JSON object, not {type(row).__name__}")
            yield number, row


def _array(path: Path, key: str) -> Rows:
    size = path.stat().st_size
    if size > MAX_JSON:
        raise RecipeError(
            f"{key}: {path} is one JSON array of {size >> 20} MiB, which would have to be read as a "
            f"whole; above {MAX_JSON >> 20} MiB write it as .jsonl or .parquet"
        )
    rows = _parsed(path.read_bytes().removeprefix(b"\xef\xbb\xbf"), f"{key}: {path}")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            where = f"{key}: {path}, row {number}"
            raise RecipeError(f"{where}: a row is a JSON object, not {type(row).__name__}")
        yield number, row


def _parquet(path: Path, choose: Choose) -> Iterator[Any]:
    import pyarrow.parquet as pq

    # memory_map: what is not read costs nothing.
    with pq.ParquetFile(path, memory_map=True) as file:
        # Names of columns, where iter_batches would also take those inside structs.
        names = choose(file.schema_arrow.names)
        yield from file.iter_batches(_BATCH, columns=names)


def _arrow(path: Path, choose: Choose) -> Iterator[Any]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        if path.open("rb").read(6) == b"ARROW1":
            reader = pa.ipc.open_file(source)
            names = choose(reader.schema.names)
            for i in range(reader.num_record_batches):
                yield reader.get_batch(i).select(names)
        else:  # the streaming format, in which `datasets` writes
            stream = pa.ipc.open_stream(source)
            names = choose(stream.schema.names)
            for batch in stream:
                yield batch.select(names)


def _batches(tables: Iterable[Any], where: str) -> Rows:
    number = 0
    for table in tables:
        for start in range(0, table.num_rows, _BATCH):
            part = table.slice(start, _BATCH)
            try:
                part.validate(full=True)  # offsets and UTF-8: damage must not crash the reader
                rows = part.to_pylist()
            except _table_errors() as error:
                raise RecipeError(
                    f"{where}, rows {number + 1} to {number + part.num_rows}: {error}. Write the "
                    "file again"
                ) from None
            for row in rows:
                number += 1
                yield number, row
