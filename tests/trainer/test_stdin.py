"""Standard input is copied once, whole, under the name of its hash."""

import hashlib
import io
import sys
from pathlib import Path

import pytest

from trainer.config.data import SourceConfig
from trainer.config.errors import UserError
from trainer.data.reading.readers import open_reader
from trainer.data.reading.stdin import spool_stdin


class Pipe(io.BytesIO):
    """A pipe gives what is there, which may be less than was asked for."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(min(size or 1, 7))


def give(monkeypatch: pytest.MonkeyPatch, content: bytes, *, terminal: bool = False) -> None:
    stdin = io.TextIOWrapper(Pipe(content))
    stdin.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", stdin)


def test_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b'{"a": "\xff\r\n"}\n{"a": 1}'  # byte by byte, whatever is wrong with it
    give(monkeypatch, content)
    path = spool_stdin(tmp_path / "new")
    assert path == tmp_path / "new" / f"{hashlib.sha256(content).hexdigest()}.jsonl"
    assert path.read_bytes() == content
    give(monkeypatch, content)
    assert spool_stdin(tmp_path / "new") == path
    assert list(path.parent.iterdir()) == [path]
    assert open_reader(SourceConfig(path=str(path)), max_row_bytes=100).sha256() == path.stem


def test_nothing_to_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, b"")
    with pytest.raises(UserError, match="standard input is empty"):
        spool_stdin(tmp_path)
    give(monkeypatch, b"{}", terminal=True)
    with pytest.raises(UserError, match="standard input, which is a terminal or closed"):
        spool_stdin(tmp_path)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="standard input, which is a terminal or closed"):
        spool_stdin(tmp_path)
    assert list(tmp_path.iterdir()) == []
