"""Bytes of files: plain or gzip, and their hashes. What the system or gzip says is an error with the file's name."""

import codecs
import gzip
import hashlib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from trainer.config.errors import UserError

_BUFFER_BYTES = 1 << 20


@contextmanager
def open_bytes(path: str) -> Iterator[BinaryIO]:
    """Open a file to read, what `.gz` packs unpacked; its `seek` counts unpacked bytes.

    raises   UserError, here and while it is read, when the file cannot be read or its gzip stream is broken
    """
    try:
        with gzip.open(path, "rb") if is_gzip(path) else open(path, "rb", buffering=_BUFFER_BYTES) as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path} is a broken gzip file: {error}; copy it again, or unpack and mend it") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def is_gzip(path: str) -> bool:
    return Path(path).suffix.lower() == ".gz"


def skip_bom(file: BinaryIO) -> int:
    """Stand behind a UTF-8 byte order mark, if the file begins with one; returns the offset: 3 or 0."""
    file.seek(0)
    if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
        return len(codecs.BOM_UTF8)
    return file.seek(0)


def skip_line(file: BinaryIO) -> int:
    """Read up to the next line's start, a piece at a time; returns the number of bytes."""
    num_bytes = 0
    while piece := file.readline(_BUFFER_BYTES):
        num_bytes += len(piece)
        if piece.endswith(b"\n"):
            break
    return num_bytes


def hash_file(path: str) -> str:
    """SHA-256 of a file's own bytes, packed or not; raises UserError when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
