"""Parquet: columns, read a batch of rows at a time, so that memory is that of a batch and not of the file.

Arrow gives each struct of a column the same fields and fills what a row does not have with null. Such a null is no
value of the row, and is dropped; a column's own null is kept, as a JSON Lines file's would be.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow
from pyarrow import parquet

from trainer.config.errors import UserError
from trainer.data.reading.raw_rows import Position, RawRow, huge

BATCH_ROWS = 128


@dataclass(frozen=True)
class ParquetRowsFile:
    """Rows `path:row`, counted from 1; going on skips whole row groups."""

    path: str
    number: int
    max_row_bytes: int
    layout = "parquet"

    def raw(self, start: Position | None = None) -> Iterator[RawRow]:
        row = start["row"] if start else 0
        with self._open() as file:
            for batch, first in _batches(file, row):
                for index, record in enumerate(records(batch, self.max_row_bytes), start=max(first, row) + 1):
                    where = f"{self.path}:{index}"
                    raw = huge(where, self.max_row_bytes, "shorten it") if record is None else record
                    yield RawRow(where, raw, {"file": self.number, "row": index})

    def parse(self, row: RawRow) -> dict[str, Any]:
        return without_fill_ins(row.raw)

    @contextmanager
    def _open(self) -> Iterator[parquet.ParquetFile]:
        try:
            with parquet.ParquetFile(self.path, memory_map=True, pre_buffer=False) as file:
                yield file
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{self.path} is no Parquet file that can be read: {str(error).splitlines()[0]}") from error


def _batches(file: parquet.ParquetFile, row: int) -> Iterator[tuple[pyarrow.RecordBatch, int]]:
    """Batches of the rows from `row` on, each with its first row's number."""
    first = 0
    for group in range(file.num_row_groups):
        end = first + file.metadata.row_group(group).num_rows
        if end > row:
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[group]):
                if first + batch.num_rows > row:
                    yield batch.slice(max(row - first, 0)), first
                first += batch.num_rows
        first = end


def records(batch: pyarrow.RecordBatch | pyarrow.Table, max_row_bytes: int) -> list[dict[str, Any] | None]:
    """A batch's rows; None for one that takes more than max_row_bytes in Arrow."""
    if batch.nbytes <= max_row_bytes:
        return batch.to_pylist()
    rows = (batch.slice(index, 1) for index in range(batch.num_rows))
    return [row.to_pylist()[0] if row.nbytes <= max_row_bytes else None for row in rows]


def without_fill_ins(record: dict[str, Any]) -> dict[str, Any]:
    return {name: _without_nulls(value) for name, value in record.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
