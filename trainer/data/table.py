"""All rows of a source as a table of tokens on disk, made once and mapped into memory.

    <cache>/data/<key>/    rows.arrow    the rows of tokenizing.py, and `row`, the good source rows numbered
                           bad.jsonl     what was left out: kind, where, what
                           report.json   counts

The key is a hash of all that decides what is in the table: the source's bytes, the tokenizer's, the chat template, the
settings, the versions of the libraries that render, and our own code, so that nothing stale is ever found. Bad rows are
judged when a table is opened, so that another `data.on_bad_row` needs no second pass.
"""

import hashlib
import json
import logging
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter

from trainer.config.data import DataConfig, OnBadRow
from trainer.config.errors import UserError
from trainer.data.opening import HOPELESS_ROWS
from trainer.data.rows import BadRow, Tokenized, TokenRow

logger = logging.getLogger(__name__)

IGNORED = -100
MAX_LISTED = 10_000
"""Bad rows of a kind whose text is kept; all are counted."""
LONG_ROW = "too long (skipped)"
"""The kind of what `data.on_long_row=skip` leaves out: asked for, and so never an error."""
_WRITE_ROWS = 1024
_TOKENS = List(Value("int32"))
_COLUMNS = {
    **dict.fromkeys(("input_ids", "labels", "rejected_input_ids", "rejected_labels"), _TOKENS),
    **{"desirable": Value("bool"), "origin": Value("string"), "content": Value("int64"), "row": Value("int64")},
}


@dataclass
class Report:
    """What became of a source's rows."""

    description: str = ""
    """What the rows look like, and which fields were read."""
    source_rows: int = 0
    """Rows read, good and bad."""
    rows: int = 0
    """Rows of tokens."""
    tokens: int = 0
    """Of pairs, both documents."""
    trained_tokens: int = 0
    truncated_rows: int = 0
    lost_tokens: int = 0
    """What truncated rows lost."""
    longest_uncut: int = 0
    """Tokens that `data.max_seq_len` would need so that none is truncated."""
    split_rows: int = 0
    """Source rows that became several."""
    duplicates: int = 0
    """Source rows that say what an earlier one says."""
    special_rows: int = 0
    """Source rows in which somebody says a special token."""
    special_first: str = ""
    """The first of them, and the token."""
    longest: int = 0
    """Tokens of the longest row."""
    longest_origin: str = ""
    bad: dict[str, int] = field(default_factory=dict)
    """Kind -> how many rows were left out for it."""


@dataclass(frozen=True)
class Table:
    """A source's rows of tokens."""

    rows: Dataset
    """Mapped from disk, in the source's order."""
    report: Report
    bad: list[BadRow]
    """What was left out, at most `MAX_LISTED` of a kind."""
    sha256: str
    """Of every token and label."""


def write_table(folder: Path, tokenized: Iterable[Tokenized], description: str, config: DataConfig) -> None:
    """Write a table into an empty folder, a row at a time.

    raises  UserError where the first `HOPELESS_ROWS` rows are all bad, whatever data.on_bad_row says
    """
    writing = _Writing(folder, Report(description), config)
    for result in tokenized:
        writing.take(result)
    writing.close()


class _Writing:
    """A table under way."""

    def __init__(self, folder: Path, report: Report, config: DataConfig) -> None:
        self._folder, self._report, self._config = folder, report, config
        self._digest, self._contents = hashlib.sha256(), array("q")
        self._bad = Counter[str]()
        self._bad_file = (folder / "bad.jsonl").open("w", encoding="utf-8")
        self._writer: ArrowWriter | None = None
        self._buffer: list[TokenRow] = []
        self._first_fault: BadRow | None = None

    def take(self, result: Tokenized) -> None:
        self._report.source_rows += 1
        if isinstance(result, BadRow):
            self._leave_out(result)
            return
        number = self._report.source_rows - self._bad.total() - 1
        self._report.split_rows += len(result) > 1
        self._contents.append(result[0]["content"])
        if word := result[0]["special_word"]:
            self._report.special_rows += 1
            self._report.special_first = self._report.special_first or f"{result[0]['origin']} says {word}"
        for row in result:
            self._count(row)
            self._buffer.append({**row, "row": number})
        if len(self._buffer) >= _WRITE_ROWS:
            self._flush()

    def _leave_out(self, fault: BadRow) -> None:
        self._first_fault = self._first_fault or fault
        self._bad[fault.kind] += 1
        if self._bad[fault.kind] <= MAX_LISTED:
            line = {"kind": fault.kind, "where": fault.where, "what": fault.what}
            self._bad_file.write(json.dumps(line, ensure_ascii=False) + "\n")
        if self._bad.total() == self._report.source_rows == HOPELESS_ROWS:
            raise UserError(f"{self._first_fault} (the first {HOPELESS_ROWS} rows are all bad: {_counted(self._bad)})")

    def _count(self, row: TokenRow) -> None:
        report = self._report
        lengths = [len(row[name]) for name in ("input_ids", "rejected_input_ids") if name in row]
        report.rows += 1
        report.tokens += sum(lengths)
        for name in ("input_ids", "labels", "rejected_input_ids", "rejected_labels"):
            if name in row:
                values = np.asarray(row[name], dtype=np.int32)
                self._digest.update(len(values).to_bytes(4, "little") + values.tobytes())
                if name.endswith("labels"):
                    report.trained_tokens += int(np.count_nonzero(values != IGNORED))
        self._digest.update(bytes([row.get("desirable", 0)]))
        del row["special_word"]
        lost = row.pop("truncated")
        report.truncated_rows += lost > 0
        report.lost_tokens += lost
        report.longest_uncut = max(report.longest_uncut, max(lengths) + lost)
        if max(lengths) > report.longest:
            report.longest, report.longest_origin = max(lengths), row["origin"]

    def _flush(self) -> None:
        if not self._buffer:
            return
        names = list(self._buffer[0])
        if self._writer is None:
            self._writer = ArrowWriter(path=str(self._folder / "rows.arrow"), features=_features(names))
        self._writer.write_batch({name: [row[name] for row in self._buffer] for name in names})
        self._buffer.clear()

    def close(self) -> None:
        self._flush()
        self._bad_file.close()
        if self._writer is not None:
            self._writer.finalize()
        self._report.bad = dict(self._bad)
        self._report.duplicates = len(self._contents) - len(np.unique(np.asarray(self._contents)))
        report = {**asdict(self._report), "sha256": self._digest.hexdigest()}
        (self._folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def as_dataset(rows: Sequence[TokenRow]) -> Dataset:
    """Rows of tokens in memory, with a table's columns and types; one row at least."""
    names = [name for name in _COLUMNS if name in rows[0]]
    return Dataset.from_dict({name: [row[name] for row in rows] for name in names}, features=_features(names))


def _features(names: Iterable[str]) -> Features:
    return Features({name: _COLUMNS[name] for name in names})


def read_table(folder: Path) -> Table:
    """Map a table that `write_table` finished."""
    written = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    sha256 = written.pop("sha256")
    path = folder / "rows.arrow"
    rows = Dataset.from_file(str(path)) if path.is_file() else Dataset.from_dict({})
    with (folder / "bad.jsonl").open(encoding="utf-8") as file:
        bad = [BadRow(**json.loads(line)) for line in file]
    return Table(rows, Report(**written), bad, sha256)


def judge(table: Table, name: str, config: DataConfig) -> None:
    """Refuse a table with bad rows, unless they may be left out.

    name    the source's, for messages
    raises  UserError about the first bad row, with the number of others of each kind; or for no good row
    """
    faults = [fault for fault in table.bad if fault.kind != LONG_ROW]
    others = Counter(table.report.bad)
    del others[LONG_ROW]
    if faults and config.on_bad_row is OnBadRow.error:
        others[faults[0].kind] -= 1
        more = f" ({others.total()} more of {table.report.source_rows} rows are refused too: {_counted(others)})"
        raise UserError(
            f"{faults[0]}{more if others.total() else ''}; data.on_bad_row=skip leaves such rows out and lists them"
        )
    if not table.report.rows:
        left_out = f", {_counted(Counter(table.report.bad))} left out" if table.report.bad else ""
        raise UserError(f"{name} holds no rows{left_out}; give at least one that can be trained on")


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in kinds.most_common() if number)
