"""A GGUF file, tensor by tensor: written under a hidden name, read back, and only then given its own.

The library's writer wants to hold all tensors; here their sizes are announced, then each is made, written and let go.
A hash of each stays, and of the file that was written everything is compared: keys, types, bytes.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from torch import Tensor

from trainer.config.errors import UserError, require
from trainer.kernels.gguf_quants import GGUF_TYPES

_FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of the file: its name there, its type, [rows, columns] or [length]."""

    name: str
    type_name: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, or of the whole vector."""
        if self.type_name in _FLOAT_BYTES:
            return self.shape[-1] * _FLOAT_BYTES[self.type_name]
        block, block_bytes, _ = GGUF_TYPES[self.type_name]
        return self.shape[-1] // block * block_bytes

    @property
    def nbytes(self) -> int:
        return self.row_bytes * (self.shape[0] if len(self.shape) == 2 else 1)


class GgufFile:
    """A file being written: entries first, then the data of each in the same order."""

    def __init__(self, writer: GGUFWriter, path: Path, entries: list[TensorEntry]) -> None:
        self.writer, self.entries = writer, entries
        for entry in entries:
            byte_shape = (*entry.shape[:-1], entry.row_bytes)
            raw_type = GGMLQuantizationType[entry.type_name]
            writer.add_tensor_info(entry.name, byte_shape, np.dtype(np.uint8), entry.nbytes, raw_type)
        self.keys = {key: value.value for key, value in writer.kv_data[0].items()}
        self.hashes: list[str] = []
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()

    def write(self, data: Tensor) -> None:
        """The bytes of the next entry, uint8 of its rows."""
        entry = self.entries[len(self.hashes)]
        array = data.contiguous().numpy()
        assert array.dtype == np.uint8 and array.nbytes == entry.nbytes, (entry, array.shape)
        self.writer.write_tensor_data(array)
        self.hashes.append(hashlib.sha256(array).hexdigest())


@contextmanager
def gguf_file(
    path: Path, writer: GGUFWriter, entries: list[TensorEntry], *, check: Callable[[GGUFReader], None] | None = None
) -> Iterator[GgufFile]:
    """A file that appears as `path` when the body has written every entry and what was written is on disk.

    check   called with what was read back
    raises  UserError if the disk is too full; RuntimeError if the file holds something else than was written
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    needs, free = sum(entry.nbytes for entry in entries) + 50_000_000, shutil.disk_usage(path.parent).free
    require(
        free >= needs,
        f"{path.parent} has {free / 1e9:.2f} GB free, {path.name} needs {needs / 1e9:.2f} GB; free some",
    )
    partial = path.with_name(f".{path.name}.partial")
    try:
        file = GgufFile(writer, partial, entries)
        yield file
        writer.close()
        reader = GGUFReader(partial)
        _compare(reader, file, path.name)
        if check is not None:
            check(reader)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


def _compare(reader: GGUFReader, file: GgufFile, name: str) -> None:
    """raises  RuntimeError if the file is not what was written"""
    keys = read_keys(reader)
    for key, value in file.keys.items():
        if key not in keys or not _same(keys[key], value):
            raise RuntimeError(f"{name} holds {key}={keys.get(key)!r}, and {value!r} was written")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if list(tensors) != [entry.name for entry in file.entries] or len(file.hashes) != len(tensors):
        raise RuntimeError(f"{name} holds {len(tensors)} tensors, and {len(file.hashes)} were written")
    for entry, written in zip(file.entries, file.hashes, strict=True):
        tensor = tensors[entry.name]
        found = tensor.tensor_type.name, tuple(int(size) for size in reversed(tensor.shape))
        if found != (entry.type_name, entry.shape) or hashlib.sha256(tensor.data.view(np.uint8)).hexdigest() != written:
            raise RuntimeError(f"{name}: the bytes of {entry.name} differ from those that were written")


def _same(found: Any, written: Any) -> bool:
    if isinstance(written, float):
        return np.float32(written) == np.float32(found)
    if isinstance(written, list | tuple):
        return len(found) == len(written) and all(map(_same, found, written))
    return bool(found == written)


def open_gguf(path: Path) -> GGUFReader:
    """A file of the user's.

    raises  UserError if it is missing, no GGUF file, damaged or one part of several
    """
    require(path.is_file(), f"{path} is no file; give the path of a .gguf file")
    with path.open("rb") as file:
        require(file.read(4) == b"GGUF", f"{path} is not a GGUF file (it does not begin with GGUF)")
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is cut off or damaged ({error}); copy or write it again") from error
    parts = reader.fields.get("split.count")
    require(
        parts is None or parts.contents() <= 1,
        f"{path} is one of several parts; join them with `llama-gguf-split --merge` and give the whole",
    )
    return reader


def read_keys(reader: GGUFReader) -> dict[str, Any]:
    """Key -> value: numbers, strings, lists of them."""
    return {key: field.contents() for key, field in reader.fields.items()}
