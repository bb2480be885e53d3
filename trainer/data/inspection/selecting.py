"""Which rows are looked at: evenly over a table, or those of a kind; each with what is to be said about it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset

from trainer.config.errors import UserError
from trainer.data.inspection.chunks import SIDES, document_lengths, sides
from trainer.data.inspection.gathering import Gathered
from trainer.data.inspection.kinds import Only
from trainer.data.inspection.pieces import Cutter, Piece
from trainer.data.inspection.report import Inspection


@dataclass(frozen=True)
class Document:
    title: str
    """`chosen`, `rejected`, `good`, `bad`; empty where a row is one document."""
    pieces: list[Piece]
    num_tokens: int
    num_targets: int


@dataclass(frozen=True)
class ShownRow:
    """A row as the model sees it."""

    number: int
    """In its table."""
    part: str
    """`train` or `held_out`."""
    source: str
    origin: str
    documents: list[Document]
    tags: dict[str, str] = field(default_factory=dict)
    """`long`, `duplicates`, `leaks` -> what is to be said."""

    @property
    def num_tokens(self) -> int:
        return sum(document.num_tokens for document in self.documents)


@dataclass
class Shelf:
    """The rows of an inspection, to be taken by number."""

    gathered: Gathered
    inspection: Inspection
    cutter: Cutter
    max_seq_len: int

    def __post_init__(self) -> None:
        duplicates = self.inspection.duplicates
        self._equals = dict(zip(duplicates.rows.tolist(), duplicates.firsts.tolist(), strict=True))
        self._ends = np.cumsum(self.gathered.sizes)
        self._leaks: dict[int, str] = {}
        for leak in self.inspection.leaks.prompts:
            self._leaks[leak.held_out_row] = f"its prompt has another answer at {leak.train}"
        for leak in self.inspection.leaks.runs:
            self._leaks[leak.held_out_row] = f"{leak.tokens} tokens in a row stand at {leak.train} too"

    def table(self, part: str) -> Dataset:
        return self.gathered.held_out if part == "held_out" else self.gathered.train

    def take(self, part: str, numbers: Iterable[int]) -> list[ShownRow]:
        """Rows of `train` or `held_out`, in the order of `numbers`."""
        numbers = list(numbers)
        return [
            self._shown(row, number, part)
            for row, number in zip(self.table(part).select(numbers) if numbers else [], numbers, strict=True)
        ]

    def _shown(self, row: dict[str, Any], number: int, part: str) -> ShownRow:
        documents = []
        for side in sides(self.table(part)):
            ids, labels = row[f"{side}input_ids"], row[f"{side}labels"]
            title = _title(row, side)
            pieces = self.cutter.pieces(ids, labels)
            documents.append(Document(title, pieces, len(ids), sum(label >= 0 for label in labels)))
        tags = self._tags(part, number, max(document.num_tokens for document in documents))
        return ShownRow(number, part, self._source(part, number), row["origin"], documents, tags)

    def _tags(self, part: str, number: int, longest: int) -> dict[str, str]:
        tags = {}
        if longest >= self.max_seq_len:
            tags["long"] = f"fills data.max_seq_len={self.max_seq_len}"
        if part == "train" and number in self._equals:
            (first,) = self.gathered.train.select([self._equals[number]])["origin"]
            tags["duplicates"] = f"equals {first}"
        if part == "held_out" and number in self._leaks:
            tags["leaks"] = self._leaks[number]
        return tags

    def _source(self, part: str, number: int) -> str:
        if part == "held_out":
            return self.gathered.held_out_names[number]
        return self.gathered.names[int(np.searchsorted(self._ends, number, side="right"))]

    # ---- which

    def evenly(self, part: str, count: int) -> list[int]:
        """`count` numbers spread over a table, the first row among them."""
        size = len(self.table(part))
        return np.unique(np.linspace(0, size - 1, min(count, size)).round().astype(int)).tolist() if size else []

    def by_length(self, count: int, *, longest: bool) -> list[int]:
        """Training rows, the longest or the shortest first."""
        train = self.gathered.train
        if not len(train):
            return []
        lengths = np.max([document_lengths(train, side) for side in sides(train)], axis=0)
        return np.argsort(-lengths if longest else lengths, kind="stable")[:count].tolist()

    def duplicated(self, count: int) -> list[int]:
        """Training rows that equal an earlier one, each behind the one that it equals."""
        numbers: dict[int, None] = {}
        for row, first in list(self._equals.items())[:count]:
            numbers |= {first: None, row: None}
        return list(numbers)[:count]

    def leaking(self, count: int) -> list[int]:
        """Held-out rows of which training sees something."""
        return list(self._leaks)[:count]

    def choose(self, only: Only, count: int) -> list[ShownRow]:
        """The rows of a kind; `bad` rows are none of any table."""
        match only:
            case Only.bad:
                return []
            case Only.held_out:
                return self.take("held_out", self.evenly("held_out", count))
            case Only.leaks:
                return self.take("held_out", self.leaking(count))
            case Only.duplicates:
                return self.take("train", self.duplicated(count))
            case Only.long | Only.short:
                return self.take("train", self.by_length(count, longest=only is Only.long))
            case Only.all | Only.train:
                return self.take("train", self.evenly("train", count))

    def find(self, wanted: str) -> list[ShownRow]:
        """The rows that a number of the training table, or a place, names; a place may leave out its folders.

        raises  UserError where there is none
        """
        if wanted.isdecimal():
            require_number(int(wanted), len(self.gathered.train))
            return self.take("train", [int(wanted)])
        found = [row for part in ("train", "held_out") for row in self.take(part, self._at(part, wanted))]
        if not found and not any(is_at(fault.where, wanted) for fault in self.gathered.bad):
            raise UserError(
                f"row={wanted} is the place of no row; give a place such as {self._example()}, or a number of 0 to "
                f"{len(self.gathered.train) - 1}"
            )
        return found

    def _at(self, part: str, wanted: str) -> list[int]:
        rows = self.table(part)
        if not len(rows):
            return []
        places = rows.with_format("arrow").select_columns(["origin"])[:]["origin"]
        ending = pc.match_substring(places, wanted).to_numpy(zero_copy_only=False)
        return [int(n) for n in np.flatnonzero(ending) if is_at(places[int(n)].as_py(), wanted)]

    def _example(self) -> str:
        return self.gathered.train[0]["origin"] if len(self.gathered.train) else "train.jsonl:1"

    def sample(self, count: int) -> list[ShownRow]:
        """Some of every kind, each row once: what a page shows of a table that is too long for it."""
        part = max(1, count // 8)
        train = [*self.duplicated(part), *self.by_length(part, longest=True), *self.by_length(part, longest=False)]
        held_out = [*self.leaking(part), *self.evenly("held_out", part)]
        held_out = sorted(set(held_out))
        train = sorted({*train, *self.evenly("train", max(1, count - len(set(train)) - len(held_out)))})
        return self.take("train", train) + self.take("held_out", held_out)


def _title(row: dict[str, Any], side: str) -> str:
    if "rejected_input_ids" in row:
        return SIDES[side] or "chosen"
    if "desirable" in row:
        return "good answer" if row["desirable"] else "bad answer"
    return ""


def is_at(place: str, wanted: str) -> bool:
    """Whether `data/train.jsonl:12` is named by `train.jsonl:12`, or by the whole; an error's column may follow."""
    behind = place.rpartition(wanted)
    return bool(behind[1]) and behind[0].endswith(("", "/")[bool(behind[0])]) and (not behind[2] or behind[2][0] == ":")


def require_number(number: int, size: int) -> None:
    if number >= size:
        raise UserError(f"row={number} is no row; give a number of 0 to {size - 1}, or a place such as train.jsonl:12")
