"""A raw row: what a reader hands on before anything is parsed, and what a reader and a file of rows are.

Reading is one process's work and cheap; parsing is many processes' work. So a raw row is a line's bytes, or what the
file's format decodes anyway, with the place where it stands and the place behind it.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from trainer.data.rows import BadRow

Position = dict[str, Any]
"""A place between two rows; goes through JSON. What is in it is the reader's own affair."""


class RawRow(NamedTuple):
    where: str
    """`train.jsonl:12`"""
    raw: Any
    """Unparsed; or a `BadRow`, for a fault that shows before parsing."""
    behind: Position
    """From here on: the rows behind this one."""


class Reader(Protocol):
    """One source. It can be pickled, and is small."""

    @property
    def name(self) -> str:
        """For people: `train.jsonl`, `org/name[train]`."""

    def sha256(self) -> str:
        """The hash of what is read: equal content, equal hash, wherever it lies."""

    def raw(self, start: Position | None = None) -> Iterator[RawRow]:
        """All rows in order, or those behind `start`; raises UserError for a file that cannot be read on."""

    def parse(self, row: RawRow) -> dict[str, Any]:
        """The row's fields; raises BadRow."""


class RowFile(Protocol):
    """One file, which has read nothing yet but what its format needs."""

    @property
    def path(self) -> str: ...

    @property
    def layout(self) -> str:
        """What its bytes are read as."""

    def raw(self, start: Position | None = None) -> Iterator[RawRow]: ...

    def parse(self, row: RawRow) -> dict[str, Any]: ...


def huge(where: str, limit: int, hint: str = "end each row with a newline") -> BadRow:
    return BadRow(
        where, f"longer than data.max_row_bytes={limit}; {hint}, or raise data.max_row_bytes", kind="huge row"
    )
