"""A place in JSON text that is read in pieces: finds where values end, without parsing them.

A value's end follows from quotes, backslashes and brackets alone. Whether the value is right is seen when its bytes are
parsed; so a fault in one value leaves the others be, as long as its brackets close.
"""

import re
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

_PIECE_BYTES = 1 << 18
_SPACE = re.compile(rb"[ \t\r\n]*+")
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_BETWEEN_BRACKETS = re.compile(rb'(?:[^"{}\[\]]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL)
_SCALAR = re.compile(rb"[^ \t\r\n,\]}]*+")


class Place(NamedTuple):
    offset: int = 0
    line: int = 1
    column: int = 0
    """Bytes of the line that are passed."""


@dataclass
class _Scan:
    """How far into a value the scan is."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False
    scalar: bool = False


class Cursor:
    def __init__(self, file: BinaryIO, place: Place) -> None:
        """file: stands at `place`"""
        self.place = place
        self._file, self._buffer, self._at = file, b"", 0

    def peek(self) -> bytes:
        """The next byte that is no white space, without taking it; b"" at the end."""
        while True:
            self._take(_SPACE.match(self._buffer, self._at).end())
            if self._at < len(self._buffer):
                return self._buffer[self._at : self._at + 1]
            if not self._fill():
                return b""

    def take(self) -> None:
        """Pass the byte that was peeked at."""
        self._take(self._at + 1)

    def value(self, limit: int, *, depth: int = 0) -> tuple[bytes | None, bool]:
        """Take the value that begins here, or, with depth=1, the rest of one whose opening bracket was taken.

        returns  its bytes, None where it has more than `limit`, and whether it ended before the file
        """
        first = self._buffer[self._at : self._at + 1]
        scan = _Scan(depth=depth, scalar=not depth and first not in (b'"', b"{", b"["))
        pieces, num_bytes, end = [], 0, None
        while end is None:
            end = _end(self._buffer, self._at, scan)
            piece = self._take(len(self._buffer) if end is None else end)
            num_bytes += len(piece)
            if num_bytes <= limit:
                pieces.append(piece)
            if end is None and not self._fill():
                break
        return b"".join(pieces) if num_bytes <= limit else None, end is not None or scan.scalar

    def _take(self, end: int) -> bytes:
        piece = self._buffer[self._at : end]
        self._at = end
        if piece:
            offset, line, column = self.place
            newline = piece.rfind(b"\n")
            if newline < 0:
                self.place = Place(offset + len(piece), line, column + len(piece))
            else:
                self.place = Place(offset + len(piece), line + piece.count(b"\n"), len(piece) - newline - 1)
        return piece

    def _fill(self) -> bool:
        self._buffer, self._at = self._file.read(_PIECE_BYTES), 0
        return bool(self._buffer)


def _end(buffer: bytes, at: int, scan: _Scan) -> int | None:
    """Where the value ends; None if not in this buffer, of which nothing is left then."""
    if scan.scalar:
        at = _SCALAR.match(buffer, at).end()
        return at if at < len(buffer) else None
    if scan.escaped and at < len(buffer):
        at, scan.escaped = at + 1, False
    while True:
        if scan.in_string:
            at = _IN_STRING.match(buffer, at).end()
            if at >= len(buffer) or buffer[at] != _QUOTE:  # else it is a backslash, the last byte
                scan.escaped = at < len(buffer)
                return None
            at, scan.in_string = at + 1, False
        else:
            at = _BETWEEN_BRACKETS.match(buffer, at).end() if scan.depth else at
            if at == len(buffer):
                return None
            mark, at = buffer[at], at + 1
            scan.in_string = mark == _QUOTE  # of a string that is the value, or one that ends in another buffer
            scan.depth += (mark in b"{[") - (mark in b"}]")
        if scan.depth <= 0 and not scan.in_string:
            return at


_QUOTE = ord('"')
