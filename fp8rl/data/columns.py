"""Columns of data sets: those shipped, and what of a row is question, answer, id and system turn.

The shipped columns and extractions are those that NeMo RL (nemo_rl/data/datasets/response_datasets) and
veRL (examples/data_preprocess) read the same sets with. Imports without torch and pyarrow.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fp8rl.recipe.data import Columns, Source

# A whole number or decimals with thousands commas, as GSM8K writes its answers.
_COMMAS = re.compile(r"[-+]?\$?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")


@dataclass(frozen=True)
class Shipped:
    """Columns of a hub data set, and the configuration to load where the recipe names none."""

    columns: Columns
    config: str | None = None


_DAPO = Columns(question="prompt", answer="reward_model.ground_truth")
SHIPPED = {
    "BytedTsinghua-SIA/AIME-2024": Shipped(_DAPO),
    "BytedTsinghua-SIA/DAPO-Math-17k": Shipped(_DAPO),
    "HuggingFaceH4/aime_2024": Shipped(Columns(question="problem", answer="answer")),
    "nvidia/OpenMathInstruct-2": Shipped(Columns(question="problem", answer="expected_answer")),
    "openai/gsm8k": Shipped(Columns(answer_after="####"), config="main"),
}


class Unusable(ValueError):
    """A row that is left out and counted. The text is the reason, the same for all rows like it."""


class BadValue(ValueError):
    """A value that cannot be what its column says. column: its name. The text says why."""

    def __init__(self, column: str, why: str) -> None:
        super().__init__(why)
        self.column = column


@dataclass(frozen=True)
class Sample:
    """A row in the terms of a task. id: as text."""

    question: str
    answer: str
    system: str | None
    id: str | None


def columns_for(source: Source) -> Columns:
    """The columns of a file or hub source: its own, those it names, those shipped, or the defaults."""
    if source.columns is not None:
        return source.columns
    shipped = SHIPPED.get(source.columns_of or source.hub or "")
    return Columns() if shipped is None else shipped.columns


def wanted(columns: Columns) -> dict[str, str]:
    """{key of `Columns`: name of the column} of the columns that are read."""
    pairs = {key: getattr(columns, key) for key in ("question", "answer", "id", "system")}
    return {key: name for key, name in pairs.items() if name is not None}


def top_level(column: str, names: Iterable[str]) -> str | None:
    """Which of a table's `names` holds `column`: one of that name, or the struct that it goes into."""
    there = set(names)
    if column in there:
        return column
    head = column.partition(".")[0]
    return head if head in there else None


def sample(row: Mapping[str, Any], columns: Columns) -> Sample:
    """The sample in `row`.

    Raises Unusable where its question or answer is missing, empty, or no text that could be kept, and
    BadValue where a value is of a wrong type.
    """
    system, question = _question(_value(row, columns.question), columns.question)
    answer = _text(_value(row, columns.answer), columns.answer, "answer")
    if columns.answer_after is not None:
        _, marker, answer = answer.rpartition(columns.answer_after)
        if not marker:
            raise Unusable(f"no {columns.answer_after} in the answer")
        answer = answer.strip()
        if _COMMAS.fullmatch(answer):
            answer = answer.replace(",", "")
    if columns.system is not None and (given := _value(row, columns.system)) is not None:
        system = _kept(_as_text(given, columns.system), "system turn")
    for what, text in (("question", question), ("answer", answer)):
        if not text.strip():
            raise Unusable(f"empty {what}")
    identity = None
    if columns.id is not None:
        identity = _id(_value(row, columns.id), columns.id)
    return Sample(question, answer, system, identity)


def _value(row: Mapping[str, Any], column: str) -> Any:
    """None where it is missing: of a key that other rows have."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise BadValue(column, f"there is {_kind(value)} where {part!r} should be inside")
        value = value.get(part)
    return value


def _question(value: Any, column: str) -> tuple[str | None, str]:
    """(system turn, question) of a text or a list of turns."""
    if not isinstance(value, list):
        return None, _text(value, column, "question")
    turns = [(t.get("role"), t.get("content")) if isinstance(t, Mapping) else (None, t) for t in value]
    roles = [role for role, _ in turns]
    if roles not in (["user"], ["system", "user"]):
        raise BadValue(
            column,
            f"the roles of its turns are {roles}; a question is one user turn, and before it perhaps a "
            "system turn",
        )
    texts = [_text(content, column, f"{role} turn") for role, content in turns]
    return (texts[0] if len(texts) == 2 else None), texts[-1]


def _text(value: Any, column: str, what: str) -> str:
    if value is None:
        raise Unusable(f"no {what}")
    return _kept(_as_text(value, column), what)


def _as_text(value: Any, column: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    raise BadValue(column, f"text or a number is needed, not {_kind(value)}")


def _kept(text: str, what: str) -> str:
    if "\0" in text:
        raise Unusable(f"NUL in the {what}")
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape
        raise Unusable(f"no valid Unicode in the {what}") from None
    return text


def _id(value: Any, column: str) -> str:
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        try:
            return _kept(str(value), "id")
        except Unusable as error:
            raise BadValue(column, str(error)) from None
    raise BadValue(column, f"an id is text or an integer, not {_kind(value)}")


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
