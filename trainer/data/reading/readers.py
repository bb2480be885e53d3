"""Readers: a file, a folder, a dataset on the hub, or rows in memory -> raw rows with the places where they stand.

The first stop of the data. Each row has a place to go on from behind it, so that a run that was stopped reads on where
it stopped; parsing a row is a step of its own, which other processes can take.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.data import STDIN, DataSource, SourceConfig
from trainer.config.errors import UserError, require
from trainer.data.reading.byte_files import hash_file, is_gzip, open_bytes
from trainer.data.reading.csv_rows import open_csv
from trainer.data.reading.documents import DocumentFile
from trainer.data.reading.files import SUFFIXES, find_files, layout_suffix
from trainer.data.reading.hub import HubReader
from trainer.data.reading.json_lines import JsonLinesFile
from trainer.data.reading.json_text import open_json
from trainer.data.reading.parquet_rows import ParquetRowsFile
from trainer.data.reading.raw_rows import Position, RawRow, Reader, RowFile
from trainer.data.rows import BadRow

__all__ = ["FilesReader", "ListReader", "Position", "RawRow", "Reader", "open_reader"]


def open_reader(source: SourceConfig, *, max_row_bytes: int, streaming: bool = False) -> Reader:
    """Find what a source names, without reading its rows.

    max_row_bytes  a longer row is a bad one, and never in memory whole where its format allows
    streaming      hub: rows come over the network as they are read, and no copy is kept
    raises         UserError: nothing there, no such split, or a format that is not read
    """
    if source.source is DataSource.hub:
        return HubReader(source.path, source.name, source.split, source.revision, streaming)
    require(source.source is DataSource.file, f"data={source.source.value} has no files to read")
    require(source.path != STDIN, "data.path=- can be read once only; it is copied to a file before it is opened")
    folder = Path(source.path)
    paths = find_files(source)
    files = tuple(_open_file(path, number, max_row_bytes=max_row_bytes) for number, path in enumerate(paths))
    if not folder.is_dir():
        return FilesReader(folder.name, files, ("",))
    name = f"{folder.resolve().name}[{source.split}]"
    return FilesReader(name, files, tuple(path.relative_to(folder).as_posix() for path in paths))


@dataclass(frozen=True)
class FilesReader:
    """Files, one after the other. A position is a file's, with its `file` number."""

    name: str
    files: tuple[RowFile, ...]
    relative: tuple[str, ...]
    """Each file's name within its folder; empty for a file that was named itself."""

    def sha256(self) -> str:
        """One JSON Lines file: its own SHA-256; else that of each file's layout, name and SHA-256."""
        digests = [hash_file(file.path) for file in self.files]
        if self.relative == ("",) and isinstance(self.files[0], JsonLinesFile):
            return digests[0]
        layouts = [file.layout for file in self.files]
        return _hash_json(list(zip(layouts, self.relative, digests, strict=True)))

    def raw(self, start: Position | None = None) -> Iterator[RawRow]:
        for file in self.files[start["file"] if start else 0 :]:
            yield from file.raw(start)
            start = None

    def parse(self, row: RawRow) -> dict[str, Any]:
        if isinstance(row.raw, BadRow):
            raise row.raw
        return self.files[row.behind["file"]].parse(row)


@dataclass(frozen=True)
class ListReader:
    """Rows in memory. They have places of their own where `places` names them, else `name:number`, counted from 1."""

    name: str
    records: Sequence[dict[str, Any]]
    places: Sequence[str] | None = None

    def sha256(self) -> str:
        return _hash_json(list(self.records))

    def raw(self, start: Position | None = None) -> Iterator[RawRow]:
        for index in range(start["row"] if start else 0, len(self.records)):
            where = self.places[index] if self.places else f"{self.name}:{index + 1}"
            yield RawRow(where, self.records[index], {"row": index + 1})

    def parse(self, row: RawRow) -> dict[str, Any]:
        return row.raw


def _hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _open_file(path: Path, number: int, *, max_row_bytes: int) -> RowFile:
    match layout_suffix(path) if layout_suffix(path) in SUFFIXES else _sniff(path):
        case ".jsonl" | ".ndjson":
            return JsonLinesFile(str(path), number, max_row_bytes)
        case ".json":
            return open_json(str(path), number, max_row_bytes=max_row_bytes)
        case ".csv":
            return open_csv(str(path), number, max_row_bytes=max_row_bytes, delimiter=",")
        case ".tsv":
            return open_csv(str(path), number, max_row_bytes=max_row_bytes, delimiter="\t")
        case ".parquet":
            require(not is_gzip(str(path)), f"{path}: Parquet is compressed within; unpack the file")
            return ParquetRowsFile(str(path), number, max_row_bytes)
        case _:
            return DocumentFile(str(path), number, max_row_bytes)


def _sniff(path: Path) -> str:
    """What a file of another suffix is, by its first bytes."""
    with open_bytes(str(path)) as file:
        begin = file.read(1 << 16)
    if begin.startswith(b"PAR1"):
        return ".parquet"
    if begin.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"["):
        return ".json"
    raise UserError(f"{path} is of no kind that is read; give it the suffix that it has: {', '.join(SUFFIXES)} or .gz")
