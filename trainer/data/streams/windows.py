"""Windows of a stream: so many raw rows that are tokenized, shuffled and packed together.

    raw rows    | window 0 | window 1 | w. 2 | window 3 | ...       a new window with each epoch, however short the last
                    rank 0     rank 1     rank 0 |  rank 1           and in the next epoch each rank is one further

What a window becomes is a function of its rows, the seed, its number and the units before it. So no buffer has to be
saved: a run goes on by reading its window once more, and a hash tells whether it still says the same. A window that
reached over an epoch's end would mix a row with its own repetition, thousands of times where a source is small.

A rank reads past the rows of other ranks' windows without parsing them. Windows change ranks with the epoch, for a rank
that always got the short last one would see its rows more often.
"""

import hashlib
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from concurrent.futures import CancelledError
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from trainer.config.data import DataConfig, OnBadRow
from trainer.config.errors import UserError
from trainer.data.loader import IGNORED, row_len
from trainer.data.opening import HOPELESS_ROWS
from trainer.data.ordering.grouping import group
from trainer.data.ordering.packing import Units, pack, single
from trainer.data.ordering.permutation import UNITS, permutation
from trainer.data.reading.raw_rows import RawRow
from trainer.data.rows import BadRow, Tokenized, TokenRow
from trainer.data.streams.interleave import Interleave
from trainer.data.table import LONG_ROW, MAX_LISTED
from trainer.data.tokenizer_pool import TokenizerPool

logger = logging.getLogger(__name__)

_COUNTS = ("window", "in_epoch", "epochs", "units")
_TOKENS = ("input_ids", "labels", "rejected_input_ids", "rejected_labels")


@dataclass
class StreamReport:
    """What became of the rows of one process, repeated passes counted."""

    source_rows: int = 0
    rows: int = 0
    """Rows of tokens."""
    tokens: int = 0
    """Of pairs, both documents."""
    trained_tokens: int = 0
    truncated_rows: int = 0
    special_rows: int = 0
    """Source rows in which somebody says a special token."""
    held_out: int = 0
    """Source rows that say what a held-out row says, left out."""
    bad: dict[str, int] = field(default_factory=dict)
    """Kind -> how many rows were left out for it."""


@dataclass
class Window:
    """What one rank takes steps from."""

    start: dict[str, Any]
    """`Windows.state()` before it."""
    units: list[list[TokenRow]]
    """One unit at least, in order; `input_ids` and `labels` [T] int32."""
    report: StreamReport
    """Up to its end."""
    bad: list[BadRow]
    """What was left out since the window before."""

    def sha256(self) -> str:
        """Of every token and label, and their order."""
        digest = hashlib.sha256()
        for unit in self.units:
            digest.update(len(unit).to_bytes(4, "little"))
            for row in unit:
                for values in (row[name] for name in _TOKENS if name in row):
                    digest.update(len(values).to_bytes(4, "little") + values.tobytes())
                digest.update(bytes([row.get("desirable", 0)]))
        return digest.hexdigest()


class Windows:
    """The windows of one rank, endlessly."""

    def __init__(
        self,
        interleave: Interleave,
        pool: TokenizerPool,
        config: DataConfig,
        *,
        seed: int,
        rank: int,
        world_size: int,
        units_per_step: int,
        held_out: Set[int],
    ) -> None:
        """units_per_step: of this rank; held_out: `content` of rows that are left out"""
        self._interleave, self._pool, self._config = interleave, pool, config
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._units_per_step, self._held_out = units_per_step, held_out
        self._window = 0  # over all ranks
        self._in_epoch = 0  # the windows of this epoch so far
        self._epochs = 0  # that had a row
        self._units = 0  # of this rank so far
        self._report = StreamReport()
        self._closed = False

    def next(self) -> Window:
        """The next window of this rank that has a row.

        raises   UserError for a bad row, unless data.on_bad_row=skip, and where a whole pass has no row to train on
        """
        bad: list[BadRow] = []
        first_whole = self._epochs + (self._in_epoch > 0)
        while self._epochs < first_whole + self._world_size:
            if (self._in_epoch + self._epochs) % self._world_size != self._rank:
                deque(self._read(), maxlen=0)
                continue
            start = self.state()
            results = self._pool.tokenize(self._read())
            if rows := list(sift(results, self._config, self._held_out, self._report, bad)):
                units = self._arrange(rows, start["window"])
                self._units += len(units)
                return Window(start, units, replace(self._report, bad=dict(self._report.bad)), bad)
        raise UserError(hopeless(self._report, bad))

    def _read(self) -> Iterator[tuple[int, RawRow]]:
        """The raw rows of a window; none where an epoch turns out to be over, which is no window."""
        read = 0
        while read < self._config.shuffle_buffer:
            if self._closed:
                raise CancelledError
            row = self._interleave.next_row()
            if row is None:
                self._epochs += bool(self._in_epoch or read)
                self._in_epoch = 0
                break
            read += 1
            yield row
        else:
            self._in_epoch += 1
        self._window += read > 0

    def _arrange(self, rows: Sequence[TokenRow], window: int) -> list[list[TokenRow]]:
        """The units of a window's rows, in order."""
        lengths = np.array([row_len(row) for row in rows])
        key = {"seed": self._seed, "epoch": window}
        shuffle = self._config.shuffle
        order = permutation(len(rows), **key) if shuffle else np.arange(len(rows))
        if self._config.packing:
            documents = 2 if "rejected_input_ids" in rows[0] else 1
            places = pack(lengths[order], documents * self._config.max_seq_len)
            units = Units(order[places.rows], places.starts)
            units = units.take(permutation(len(units), **key, stream=UNITS)) if shuffle else units
        elif self._config.group_by_length:
            head = -self._units % self._units_per_step
            units = single(group(lengths, order, self._units_per_step, **key, head=head))
        else:
            units = single(order)
        return [[rows[row] for row in unit] for unit in (units[index] for index in range(len(units)))]

    def state(self) -> dict[str, Any]:
        """Where the next window is looked for; goes through JSON."""
        counts = {name: getattr(self, f"_{name}") for name in _COUNTS}
        return {**counts, "report": asdict(self._report), "mix": self._interleave.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state()` was taken."""
        for name in _COUNTS:
            setattr(self, f"_{name}", state[name])
        self._report = StreamReport(**{**state["report"], "bad": dict(state["report"]["bad"])})
        self._interleave.restore(state["mix"])

    def close(self) -> None:
        """Let go of open files; a window that another thread is reading is given up."""
        self._closed = True
        self._interleave.close()


def sift(
    results: Iterable[Tokenized], config: DataConfig, held_out: Set[int], report: StreamReport, bad: list[BadRow]
) -> Iterator[TokenRow]:
    """The rows to train on, without what they no longer need; what is left out is counted and listed.

    raises   UserError for a bad row, unless data.on_bad_row=skip
    """
    for result in results:
        report.source_rows += 1
        if isinstance(result, BadRow):
            _leave_out(result, config, report, bad)
        elif result[0]["content"] in held_out:
            report.held_out += 1
        else:
            _note_special_word(result[0], report)
            for row in result:
                _count(row, report)
                yield {name: value for name, value in row.items() if name not in ("truncated", "special_word")}


def _note_special_word(row: TokenRow, report: StreamReport) -> None:
    if word := row.get("special_word"):
        if not report.special_rows:
            logger.warning(
                "data     %s says %s, and maybe other rows do: a model reads it as the chat template's own",
                row["origin"],
                word,
            )
        report.special_rows += 1


def _leave_out(fault: BadRow, config: DataConfig, report: StreamReport, bad: list[BadRow]) -> None:
    if config.on_bad_row is OnBadRow.error and fault.kind != LONG_ROW:
        raise UserError(f"{fault}; data.on_bad_row=skip leaves such rows out and lists them")
    report.bad[fault.kind] = report.bad.get(fault.kind, 0) + 1
    if len(bad) < MAX_LISTED:
        bad.append(fault)
    if not report.rows and report.source_rows == sum(report.bad.values()) == HOPELESS_ROWS:
        raise UserError(hopeless(report, bad))


def hopeless(report: StreamReport, bad: Sequence[BadRow]) -> str:
    """What to say where no row is left."""
    kinds = ", ".join(f"{number} {kind}" for kind, number in report.bad.items())
    first = f"; the first: {bad[0]}" if bad else ""
    return (
        f"no row to train on among the last rows read: of {report.source_rows} so far, {report.held_out} are copies of "
        f"held-out rows and {sum(report.bad.values())} left out ({kinds or 'none'}){first}. Give rows that can be "
        "trained on, or hold out fewer"
    )


def _count(row: TokenRow, report: StreamReport) -> None:
    report.rows += 1
    report.tokens += row_len(row)
    labels = [row[name] for name in ("labels", "rejected_labels") if name in row]
    report.trained_tokens += sum(int(np.count_nonzero(each != IGNORED)) for each in labels)
    report.truncated_rows += row["truncated"] > 0
