"""Rows of letters for tests of streams: a reader and a tokenizer that a worker imports in no time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainer.data.reading.raw_rows import Position, RawRow, Reader
from trainer.data.rows import BadRow, Tokenized

MAX_SEQ_LEN = 16


@dataclass(frozen=True)
class Texts:
    """A reader of `name:1`, `name:2`, ..."""

    name: str
    texts: list[str]

    def raw(self, start: Position | None = None) -> Iterator[RawRow]:
        for row in range(start["row"] if start else 0, len(self.texts)):
            yield RawRow(f"{self.name}:{row + 1}", {"text": self.texts[row]}, {"row": row + 1})

    def parse(self, raw: RawRow) -> dict[str, Any]:
        return raw.raw


@dataclass(frozen=True)
class Letters:
    """A row's text as its bytes: 1 to 16 tokens. `bad` cannot be trained on, and `two` becomes two rows."""

    reader: Reader | Texts

    def __call__(self, raw: RawRow) -> Tokenized:
        try:
            text = self.reader.parse(raw)["text"]
        except BadRow as fault:
            return fault
        if text.startswith("bad"):
            return BadRow(raw.where, "it is bad", kind="bad")
        ids = list(text.encode()[:MAX_SEQ_LEN])
        row = {"input_ids": ids, "labels": [-100, *ids[1:]], "origin": raw.where, "content": hash_of(text)}
        rows = [{**row, "truncated": len(text) - len(ids)}]
        return rows * 2 if text.startswith("two") else rows


def hash_of(text: str) -> int:
    return int.from_bytes(text.encode()[:8].ljust(8, b"."), "big")


def texts(name: str, size: int, kinds: str = "") -> list[str]:
    """`size` texts of 2 to 16 bytes, each as its letter in `kinds` says: bad, two rows, or one."""
    words = {"b": "bad", "t": "two"}
    return [
        (words.get(kinds[row % len(kinds)] if kinds else "", "") + f"{name}{row}" + "x" * (row * 7 % 12))[:MAX_SEQ_LEN]
        for row in range(size)
    ]
