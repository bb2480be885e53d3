"""CSV and TSV with a header: Python's csv splits fields, and this module keeps count of bytes and lines around it.

csv takes a line after the other until a row is whole, so that behind each row it stands at a line's start: a place to
go on from. Bytes that are not UTF-8 pass it as lone surrogates, so that one of them spoils its own row and no other.
"""

import csv
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from trainer.config.errors import UserError, require
from trainer.data.reading.byte_files import open_bytes, skip_bom
from trainer.data.reading.raw_rows import Position, RawRow, huge
from trainer.data.rows import BadRow, fail


@dataclass(frozen=True)
class CsvRowsFile:
    """Rows `path:line`, the line at which the row begins. All values are strings."""

    path: str
    number: int
    max_row_bytes: int
    delimiter: str
    header: tuple[str, ...]
    layout = "csv"

    def raw(self, start: Position | None = None) -> Iterator[RawRow]:
        with open_bytes(self.path) as file:
            rows = _Rows(file, self.delimiter, max_row_bytes=self.max_row_bytes)
            if start:
                rows.offset, rows.line = file.seek(start["offset"]), start["line"]
            else:
                rows.next_row()  # the header
            while (fields := rows.next_row()) is not None:
                where = f"{self.path}:{rows.first_line}"
                if isinstance(fields, str):
                    fields = BadRow(where, fields, kind="broken CSV")
                elif not fields:
                    fields = huge(where, self.max_row_bytes, "close each quote")
                yield RawRow(where, fields, {"file": self.number, "offset": rows.offset, "line": rows.line})

    def parse(self, row: RawRow) -> dict[str, Any]:
        if len(row.raw) != len(self.header):
            counts = f"{len(row.raw)} fields, but the header has {len(self.header)}"
            what = f"{counts}; quote fields that hold a {_NAMES[self.delimiter]}, a quote or a newline"
            fail(row.where, what, kind="number of fields")
        for name, value in zip(self.header, row.raw, strict=True):
            if byte := _not_utf8(value):
                what = f"{name} has a byte (0x{byte:02x}) that is not UTF-8; save the file as UTF-8"
                fail(row.where, what, kind="not UTF-8")
        return dict(zip(self.header, row.raw, strict=True))


_NAMES = {",": "comma", "\t": "tab"}


def open_csv(path: str, number: int, *, max_row_bytes: int, delimiter: str) -> CsvRowsFile:
    """Read the header.

    raises   UserError when there is none, or one that cannot name a row's fields
    """
    with open_bytes(path) as file:
        header = _Rows(file, delimiter, max_row_bytes=max_row_bytes).next_row()
    require(header is not None, f"{path} is empty; its first line names the fields")
    if isinstance(header, str) or not header or any(_not_utf8(name) for name in header):
        raise UserError(f"{path}:1: the first line is no header: {header or 'too long'!r}; name the fields in UTF-8")
    if len(header) == 1 and (other := next((mark for mark in ";\t|" if delimiter != mark and mark in header[0]), None)):
        raise UserError(f"{path}:1: {other!r} stands between the fields; write {delimiter!r}, or call the file .tsv")
    names = [repr(name) for name, count in Counter(header).items() if count > 1]
    require(not names, f"{path}:1: the header has {' and '.join(names)} more than once; give each field its own name")
    require(all(name.strip() for name in header), f"{path}:1: the header has a field without a name; name each one")
    return CsvRowsFile(path, number, max_row_bytes, delimiter, tuple(header))


class _Huge(Exception):
    """The row under way is too long."""


class _Rows:
    """Rows from a line's start on; `offset` and `line` stand behind the last row, `first_line` where it began."""

    def __init__(self, file: BinaryIO, delimiter: str, *, max_row_bytes: int) -> None:
        csv.field_size_limit(max(csv.field_size_limit(), max_row_bytes))  # else 128 KiB, whatever data.* says
        self.file, self.delimiter, self.max_row_bytes = file, delimiter, max_row_bytes
        self.offset = skip_bom(file)
        self.line = self.first_line = self._row_bytes = self._quotes = 0
        self._open()

    def next_row(self) -> list[str] | str | None:
        """Fields; none of them for a row that is too long, which was passed; or what is wrong, in csv's words; None at
        the end."""
        self._row_bytes = self._quotes = 0
        try:
            return next(self._reader, None)
        except csv.Error as error:
            return f"broken CSV: {str(error).partition(' - ')[0]}; write a quote within a quoted field twice"
        except _Huge:
            self._pass_row()
            return []

    def _open(self) -> None:
        self._reader = csv.reader(self._lines(), delimiter=self.delimiter, strict=True)

    def _lines(self) -> Iterator[str]:
        while line := self._take():
            if self._row_bytes == 0:
                if line.endswith(b"\n") and not line.strip(b" \r\n"):
                    continue
                self.first_line = self.line
            self._row_bytes += len(line)
            self._quotes += line.count(b'"')
            if self._row_bytes > self.max_row_bytes + line.endswith(b"\n"):
                self._last = line
                raise _Huge
            yield line.decode("utf-8", "surrogateescape")

    def _take(self) -> bytes:
        line = self.file.readline(self.max_row_bytes + 2)
        self.offset += len(line)
        self.line += bool(line)
        return line

    def _pass_row(self) -> None:
        """Read to the row's end, as quotes tell it: within a quoted field their number is odd at its end."""
        piece = self._last
        while piece:
            while not piece.endswith(b"\n") and (piece := self._piece()):
                pass
            if self._quotes % 2 == 0:
                break
            piece = self._piece()
            self.line += bool(piece)
        self._open()

    def _piece(self) -> bytes:
        piece = self.file.readline(1 << 20)
        self.offset += len(piece)
        self._quotes += piece.count(b'"')
        return piece


def _not_utf8(text: str) -> int | None:
    """The first byte that was not UTF-8."""
    if text.isascii():
        return None
    return next((ord(char) - 0xDC00 for char in text if "\udc80" <= char <= "\udcff"), None)
