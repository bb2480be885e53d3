"""The tokens of a table, a few million at a time: what everything here counts on, in flat memory.

A document is what the model reads from its first token to its last: a row, or of a pair each of its two sides.

    input_ids  | 5 8 9 2 | 5 7 2 | 5 8 8 8 2 |        one array for a chunk of documents
    starts       0         4       7           12
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from trainer.data.loader import IGNORED

CHUNK_TOKENS = 1 << 20
SIDES = {"": "", "rejected_": "rejected"}
"""A column's beginning -> what people call the document; of a pair the first one is the chosen answer."""


@dataclass(frozen=True)
class Chunk:
    """Documents one after the other."""

    ids: np.ndarray
    """[T] int32"""
    labels: np.ndarray
    """[T] int32: the token's id where it is a target, else -100."""
    starts: np.ndarray
    """[D + 1] int64: document d has the tokens starts[d] to starts[d + 1]."""
    first_row: int
    """The row of document 0; the others follow."""
    side: str
    """Key of `SIDES`."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def rows(self) -> np.ndarray:
        """[D] int64: each document's row in the table."""
        return np.arange(self.first_row, self.first_row + len(self))

    @cached_property
    def lengths(self) -> np.ndarray:
        """[D] int64, tokens."""
        return np.diff(self.starts)

    @cached_property
    def is_target(self) -> np.ndarray:
        """[T] bool"""
        return self.labels != IGNORED

    @cached_property
    def first_target(self) -> np.ndarray:
        """[D] int64: how many tokens stand before each document's first target; all, where it has none."""
        places = np.append(np.flatnonzero(self.is_target), len(self.ids))
        found = places[np.searchsorted(places, self.starts[:-1])]
        return np.minimum(found, self.starts[1:]) - self.starts[:-1]


def sides(rows: Dataset) -> list[str]:
    """The keys of `SIDES` that a table has."""
    return [side for side in SIDES if f"{side}input_ids" in rows.column_names]


def document_lengths(rows: Dataset, side: str = "") -> np.ndarray:
    """[len(rows)] int64: tokens of each row's document."""
    if not len(rows):
        return np.zeros(0, np.int64)
    name = f"{side}input_ids"
    whole = rows.data if rows._indices is None else rows.with_format("arrow").select_columns([name])[:]
    return pc.list_value_length(whole[name]).to_numpy().astype(np.int64)


def chunks(rows: Dataset, *, chunk_tokens: int = CHUNK_TOKENS, every: int = 1) -> Iterator[Chunk]:
    """All documents of a table: first each row's own, then of pairs the rejected ones.

    rows          `input_ids`, `labels`, of pairs also `rejected_input_ids` and `rejected_labels`
    chunk_tokens  about how many tokens are in memory at a time; a longer document is a chunk of its own
    every         give only the first of so many chunks, and read no other
    """
    for side in sides(rows):
        ends = np.cumsum(document_lengths(rows, side))
        table = rows.with_format("arrow").select_columns([f"{side}input_ids", f"{side}labels"])
        first = number = 0
        while first < len(rows):
            before = ends[first - 1] if first else 0
            stop = max(first + 1, int(np.searchsorted(ends, before + chunk_tokens, side="right")))
            if number % every == 0:
                yield _chunk(table[first:stop], first, side)
            first, number = stop, number + 1


def _chunk(table: pa.Table, first_row: int, side: str) -> Chunk:
    ids, labels = (table[f"{side}{name}"].combine_chunks() for name in ("input_ids", "labels"))
    if isinstance(ids, pa.ChunkedArray):  # of no chunks
        ids, labels = (pa.array([], pa.list_(pa.int32())),) * 2
    lengths = pc.list_value_length(ids).to_numpy(zero_copy_only=False).astype(np.int64)
    flat = (array.flatten().to_numpy(zero_copy_only=False).astype(np.int32, copy=False) for array in (ids, labels))
    return Chunk(*flat, np.concatenate([[0], np.cumsum(lengths)]), first_row, side)


def origins(rows: Dataset, places: np.ndarray) -> list[str]:
    """Where some rows come from; places [P] int."""
    return rows.select(places)["origin"][:] if len(places) else []
