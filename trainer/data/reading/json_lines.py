"""JSON Lines: one object a line. Lines end at a newline byte and nowhere else, since text may hold U+2028 and its like,
at which `str.splitlines` would cut a row in two.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from trainer.data.reading.byte_files import open_bytes, skip_bom, skip_line
from trainer.data.reading.raw_rows import Position, RawRow, huge
from trainer.data.rows import BadRow, fail

_NEWLINE = ord("\n")
_JSON_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}


@dataclass(frozen=True)
class JsonLinesFile:
    """Rows `path:line`; going on is a seek, but in a .gz."""

    path: str
    number: int
    max_row_bytes: int
    layout = "json lines"

    def raw(self, start: Position | None = None) -> Iterator[RawRow]:
        with open_bytes(self.path) as file:
            offset = file.seek(start["offset"]) if start else skip_bom(file)
            yield from self._rows(file, offset, line=start["line"] if start else 0)

    def _rows(self, file: BinaryIO, offset: int, *, line: int) -> Iterator[RawRow]:
        # Names that are local, since this loop is passed hundreds of thousands of times a second.
        path, number, limit, read = self.path, self.number, self.max_row_bytes, file.readline
        raw: bytes | BadRow
        while raw := read(limit + 1):
            line += 1
            offset += len(raw)
            if len(raw) > limit and raw[-1] != _NEWLINE:
                offset += skip_line(file)
                raw = huge(f"{path}:{line}", limit)
            elif raw.isspace():
                continue
            yield RawRow(f"{path}:{line}", raw, {"file": number, "offset": offset, "line": line})

    def parse(self, row: RawRow) -> dict[str, Any]:
        text = decode(row.raw, row.where)
        try:
            record = parse_json(text)
        except (ValueError, RecursionError) as error:
            what = getattr(error, "msg", str(error))
            where = f"{row.where}:{getattr(error, 'colno', 1)}"
            fail(where, f"broken JSON: {what}; write one complete JSON object a line", kind="broken JSON")
        if not isinstance(record, dict):
            fail(
                row.where, f"the line is {kind(record)}, not an object; write one JSON object a line", kind="no object"
            )
        return record


def decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8; save the file as UTF-8"
        fail(where, what, kind="not UTF-8")


def parse_json(text: str) -> Any:
    """json.loads, but that a key which stands twice in one object is an error: the first of the two would be lost.

    raises  ValueError, RecursionError
    """
    return json.loads(text, object_pairs_hook=_each_key_once)


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object")
    return record


def kind(value: Any) -> str:
    """What a value is in JSON's words."""
    return _JSON_NAMES.get(type(value), "a number")
