"""Ragged tables as Parquet bytes."""

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def to_parquet(columns: dict[str, list[Any]]) -> bytes:
    """Parquet bytes of equally long columns."""
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def from_parquet(content: bytes) -> dict[str, list[Any]]:
    """The columns that `to_parquet` wrote."""
    return pq.read_table(io.BytesIO(content)).to_pydict()
