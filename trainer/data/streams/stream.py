"""Training rows that are read while training; nothing of them is kept on disk.

    readers -> interleave.py -> tokenizer_pool.py -> windows.py -> steps (here) -> loop
               raw rows, mixed  tokens, in workers   shuffled, packed

No iterator's state and no buffer is saved, for what a window becomes is a function of its rows and a few numbers (see
windows.py). A checkpoint has some hundred bytes: where the window in progress begins in each source, how many of its
units were taken, and its hash. A resumed run reads the window again, refuses it if it is not the same, and goes on
behind the units taken. Nothing is dropped between windows: a step takes what is left of one and goes on with the next.

With workers a thread prepares the next window while steps are taken from this one. Rows and order are the same without.
"""

from collections.abc import Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from accelerate.utils import gather_object

from trainer.config.data import DataConfig
from trainer.config.errors import UserError, require
from trainer.data.reading.raw_rows import Reader
from trainer.data.rows import BadRow, TokenRow
from trainer.data.streams.interleave import HeldOut, Interleave
from trainer.data.streams.windows import StreamReport, Window, Windows, hopeless, sift
from trainer.data.table import MAX_LISTED
from trainer.data.tokenizer_pool import TokenizerPool, Tokenizing


class StreamSteps:
    """Steps of a stream, one after the other; see `steps.Steps`. Close it in the end."""

    def __init__(
        self,
        readers: Sequence[Reader],
        tokenizers: Sequence[Tokenizing],
        config: DataConfig,
        *,
        seed: int,
        rank: int,
        world_size: int,
        batch_size: int,
        grad_accum_steps: int,
        max_steps: int,
        held_out: Set[int] = frozenset(),
        skip: dict[int, HeldOut] | None = None,
    ) -> None:
        """readers, tokenizers: one for each of `config.sources()`

        batch_size  units a rank takes in a micro-batch: rows, or with packing several rows in one
        held_out    `content` of rows that are left out wherever they stand
        skip        by source, the rows at its beginning that are left out
        raises      UserError for settings that need to know the sources' sizes
        """
        self._readers, self._tokenizers, self._config = list(readers), list(tokenizers), config
        self._held_out, self._skip = held_out, skip
        self._batch_size, self._grad_accum_steps, self.num_steps = batch_size, grad_accum_steps, max_steps
        self._pool = TokenizerPool(tokenizers, num_workers=config.num_workers)
        self._windows = Windows(
            Interleave(readers, config, skip=skip),
            self._pool,
            config,
            seed=seed,
            rank=rank,
            world_size=world_size,
            units_per_step=batch_size * grad_accum_steps,
            held_out=held_out,
        )
        self._thread = ThreadPoolExecutor(1, "data") if config.num_workers else None
        self._ahead: Future[Window] | None = None
        self._start = self._windows.state()
        self._window: Window | None = None
        self._taken = 0
        self._step = 0
        self._origins: list[str] = []
        self._bad: dict[str, BadRow] = {}

    @property
    def report(self) -> StreamReport:
        """What was read so far, up to the end of the window in progress, by this rank."""
        return self._window.report if self._window else StreamReport()

    @property
    def bad_rows(self) -> list[BadRow]:
        """What this rank left out since the run was started or resumed, each place once; at most `MAX_LISTED`."""
        return list(self._bad.values())

    def micro_batches(self, step: int) -> list[list[TokenRow]]:
        if step != self._step or step >= self.num_steps:
            raise ValueError(f"step {step}: a stream gives its steps in order, now {self._step} of {self.num_steps}")
        units = range(self._batch_size)
        rows = [[row for _ in units for row in self._take()] for _ in range(self._grad_accum_steps)]
        self._origins = [row["origin"] for micro in rows for row in micro]
        self._step += 1
        return [[_listed(row) for row in micro] for micro in rows]

    def _take(self) -> list[TokenRow]:
        """The next unit."""
        if self._window is None or self._taken == len(self._window.units):
            self._enter(self._next_window())
        self._taken += 1
        return self._window.units[self._taken - 1]

    def _next_window(self) -> Window:
        if self._thread is None:
            return self._windows.next()
        ahead = self._ahead or self._thread.submit(self._windows.next)
        self._ahead = None
        window = ahead.result()
        self._ahead = self._thread.submit(self._windows.next)
        return window

    def _enter(self, window: Window) -> None:
        self._window, self._taken, self._start = window, 0, window.start
        for fault in window.bad:
            if len(self._bad) < MAX_LISTED:
                self._bad.setdefault(fault.where, fault)

    def row_ids(self, step: int) -> list[str]:
        if step != self._step - 1:
            raise ValueError(f"step {step}: a stream knows the rows of its newest step, {self._step - 1}")
        return gather_object(self._origins)

    def state(self) -> dict[str, Any]:
        return {
            "start": self._start,
            "taken": self._taken,
            "sha256": self._window.sha256() if self._window else None,
        }

    def restore(self, state: dict[str, Any], step: int) -> None:
        if self._ahead is not None:
            self._ahead.result()
            self._ahead = None
        self._windows.restore(state["start"])
        self._step, self._window, self._taken, self._start = step, None, 0, state["start"]
        if state["sha256"] is None:
            return
        try:
            self._enter(self._next_window())
        except UserError as error:
            raise UserError(self._changed(f"cannot be read again: {error}")) from error
        require(self._window.sha256() == state["sha256"], self._changed("do not give the same tokens again"))
        self._taken = state["taken"]

    def _changed(self, how: str) -> str:
        names = ", ".join(reader.name for reader in self._readers)
        return (
            f"{names}: rows that this run was in the middle of {how}. The data, the tokenizer, the chat template or "
            "settings of data changed since the checkpoint; restore them, or start a new run without resume"
        )

    def sample(self, num_rows: int) -> list[TokenRow]:
        interleave = Interleave(self._readers, self._config, skip=self._skip)
        with TokenizerPool(self._tokenizers, num_workers=0) as pool:
            results = pool.tokenize(iter(interleave.next_row, None))
            report, bad = StreamReport(), []
            rows = sift(results, self._config, self._held_out, report, bad)
            some = [_listed(row) for row, _ in zip(rows, range(num_rows), strict=False)]
        require(bool(some), hopeless(report, bad))
        return some

    def close(self) -> None:
        self._windows.close()
        self._pool.close()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._ahead = None


def _listed(row: TokenRow) -> TokenRow:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}
