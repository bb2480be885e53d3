"""Text files: each is one row, `{"text": ...}`."""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainer.data.reading.byte_files import open_bytes
from trainer.data.reading.json_lines import decode
from trainer.data.reading.raw_rows import Position, RawRow, huge


@dataclass(frozen=True)
class DocumentFile:
    """One row, whose place is the file; nothing of it is cut."""

    path: str
    number: int
    max_row_bytes: int
    layout = "document"

    def raw(self, start: Position | None = None) -> Iterator[RawRow]:
        if start:
            return
        with open_bytes(self.path) as file:
            raw = file.read(self.max_row_bytes + 1)
        if len(raw) > self.max_row_bytes:
            raw = huge(self.path, self.max_row_bytes, "a text file is one row: cut it into several")
        yield RawRow(self.path, raw, {"file": self.number, "row": 1})

    def parse(self, row: RawRow) -> dict[str, Any]:
        return {"text": decode(row.raw.removeprefix(codecs.BOM_UTF8), row.where)}
