"""JSON that is not lines: a list of objects, or an object with one such list.

A row's place is the line where it begins, and its column too where another row stands on that line.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainer.config.errors import UserError, require
from trainer.data.reading.byte_files import open_bytes, skip_bom
from trainer.data.reading.json_cursor import Cursor, Place
from trainer.data.reading.json_lines import JsonLinesFile, decode, kind, parse_json
from trainer.data.reading.raw_rows import Position, RawRow, huge
from trainer.data.rows import fail

_TURNS = frozenset(("messages", "conversations", "conversation", "chosen", "rejected", "prompt", "completion", "tools"))
"""Fields of a row that are lists of objects themselves."""

_NAME_BYTES = 1 << 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JsonListFile:
    """Rows `path:line` or `path:line:column`."""

    path: str
    number: int
    max_row_bytes: int
    begin: Place
    """Behind the list's opening bracket."""
    alone: bool
    """The list is all that the file holds."""
    layout = "json"

    def raw(self, start: Position | None = None) -> Iterator[RawRow]:
        place = Place(start["offset"], start["line"], start["column"]) if start else self.begin
        with open_bytes(self.path) as file:
            file.seek(place.offset)
            cursor = Cursor(file, place)
            first = start is None
            while self._next(cursor, first=first):
                yield self._row(cursor, 0 if first else place.line)
                place, first = cursor.place, False

    def _next(self, cursor: Cursor, *, first: bool) -> bool:
        """Stand at the next value, or find the list's end."""
        mark = cursor.peek()
        if mark == b"]":
            cursor.take()
            if self.alone and cursor.peek():
                self._fail(cursor, "text behind the list")
            return False
        if not first:
            if mark != b",":
                self._fail(cursor, "no comma between two rows" if mark else "the file ends within its list")
            cursor.take()
            mark = cursor.peek()
        if mark in (b"", b",", b"]", b"}"):
            self._fail(cursor, "no row where one is expected" if mark else "the file ends within its list")
        return True

    def _row(self, cursor: Cursor, line_before: int) -> RawRow:
        begin = cursor.place
        where = f"{self.path}:{begin.line}"
        where += f":{begin.column + 1}" if begin.line == line_before else ""
        raw, ended = cursor.value(self.max_row_bytes)
        if not ended:
            raise UserError(f"{where}: the file ends within this row, or a bracket of it is not closed; mend the file")
        if raw is None:
            raw = huge(where, self.max_row_bytes, "close each quote and bracket")
        return RawRow(where, raw, {"file": self.number, **cursor.place._asdict()})

    def _fail(self, cursor: Cursor, what: str) -> None:
        place = cursor.place
        where = f"{self.path}:{place.line}:{place.column + 1}"
        raise UserError(f"{where}: broken JSON: {what}; mend it, or write one JSON object a line")

    def parse(self, row: RawRow) -> dict[str, Any]:
        text = decode(row.raw, row.where)
        try:
            record = parse_json(text)
        except json.JSONDecodeError as error:
            what = f"{error.msg} (line {error.lineno}, character {error.colno} of the row)"
            fail(row.where, f"broken JSON: {what}; mend it or remove the row", kind="broken JSON")
        except (ValueError, RecursionError) as error:
            fail(row.where, f"broken JSON: {error}; mend it or remove the row", kind="broken JSON")
        if not isinstance(record, dict):
            fail(row.where, f"the row is {kind(record)}, not an object; write a list of objects", kind="no object")
        return record


def open_json(path: str, number: int, *, max_row_bytes: int) -> JsonListFile | JsonLinesFile:
    """Find a `.json` file's list of rows: the file, one of its fields, or the lines of JSON Lines.

    raises   UserError for one object that holds no list of objects, or several
    """
    with open_bytes(path) as file:
        begin = skip_bom(file)
        cursor = Cursor(file, Place(begin, 1, begin))
        first = cursor.peek()
        if first == b"[":
            cursor.take()
            return JsonListFile(path, number, max_row_bytes, cursor.place, alone=True)
        fields = _fields(cursor) if first == b"{" else None
        one_line = cursor.place.line == 1
        if fields is None or cursor.peek():
            return JsonLinesFile(path, number, max_row_bytes)
    lists = {name: place for name, place in fields.items() if place}
    if len(lists) == 1 and not lists.keys() & _TURNS:
        ((name, place),) = lists.items()
        logger.info("%s: the rows are the list %s", path, name)
        return JsonListFile(path, number, max_row_bytes, place, alone=False)
    require(
        one_line,
        f"{path} is one object with the fields {', '.join(fields) or '(none)'}, of which {len(lists)} are lists of "
        "objects; give a list of objects, an object with one such list, or one object a line",
    )
    return JsonLinesFile(path, number, max_row_bytes)


def _fields(cursor: Cursor) -> dict[str, Place | None] | None:
    """An object's fields, each with the place behind the bracket of its list of objects; None if it does not end."""
    fields: dict[str, Place | None] = {}
    cursor.take()
    while cursor.peek() == b'"':
        name, ended = cursor.value(_NAME_BYTES)
        if not ended or cursor.peek() != b":":
            return None
        cursor.take()
        is_list = cursor.peek() == b"["
        if is_list:
            cursor.take()
        place = cursor.place
        holds_objects = is_list and cursor.peek() == b"{"
        if not cursor.value(0, depth=int(is_list))[1]:
            return None
        fields[(name or b"").decode("utf-8", "replace").strip('"')] = place if holds_objects else None
        if cursor.peek() != b",":
            break
        cursor.take()
    if cursor.peek() != b"}":
        return None
    cursor.take()
    return fields
