"""Standard input: copied to a file named by its hash, since rows are read more than once and a run may be resumed."""

import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

from trainer.config.errors import UserError, require

_PIECE_BYTES = 1 << 20


def spool_stdin(folder: Path) -> Path:
    """Copy standard input, JSON Lines, to `<folder>/<sha256>.jsonl`; the file is whole or absent.

    raises   UserError when standard input is a terminal, closed or empty
    """
    require(
        sys.stdin is not None and not sys.stdin.closed and not sys.stdin.isatty(),
        "data.path=- reads rows from standard input, which is a terminal or closed; write cat rows.jsonl | lowbit ...",
    )
    folder.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=folder, prefix=".stdin-", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            digest = _copy(sys.stdin.buffer, file)
        path = folder / f"{digest}.jsonl"
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
    return path


def _copy(source: BinaryIO, file: BinaryIO) -> str:
    digest, num_bytes = hashlib.sha256(), 0
    while piece := source.read(_PIECE_BYTES):
        digest.update(piece)
        num_bytes += file.write(piece)
    if num_bytes == 0:
        raise UserError("data.path=- : standard input is empty; write cat rows.jsonl | lowbit ...")
    return digest.hexdigest()
