"""Raw rows of several sources to rows of tokens, in this process or in workers that live as long as the pool.

The rows and their order do not depend on the number of workers. At most a few chunks are under way, so that memory does
not grow with the file. Token ids come as int32 arrays: from another process lists would take longer to unpack than
their rows to tokenize, and a window of them nine times the memory.

Workers never outlive this process: an interrupt is this process's to answer, and whatever ends it ends them.
"""

import logging
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from ctypes import c_byte
from itertools import islice
from multiprocessing import connection, get_context, parent_process
from typing import Protocol

import numpy as np

from trainer.data.reading.raw_rows import RawRow
from trainer.data.rows import BadRow, Tokenized, TokenRow

CHUNK_ROWS = 256
"""Raw rows that travel to a worker at a time."""

logger = logging.getLogger(__name__)


class Tokenizing(Protocol):
    """As `RowTokenizer`: what becomes of a raw row. It can be pickled."""

    def __call__(self, raw: RawRow, /) -> Tokenized: ...


class TokenizerPool:
    """Tokenizes rows of several sources; `close` it, or use it in a `with` statement."""

    def __init__(self, tokenizers: Sequence[Tokenizing], *, num_workers: int) -> None:
        """tokenizers: one a source; num_workers: processes, 0 for this one"""
        self._tokenizers, self._num_workers = tuple(tokenizers), num_workers
        self._workers: ProcessPoolExecutor | None = None
        if num_workers:
            context = get_context("spawn")
            # without a lock, which a worker that is killed could hold
            stop = context.RawValue("b", 0)
            self._workers = ProcessPoolExecutor(num_workers, context, _start_worker, (self._tokenizers, stop))
            # also where nobody closes the pool, as after an exception
            self._end = weakref.finalize(self, _end_workers, self._workers, stop)

    def tokenize(self, rows: Iterable[tuple[int, RawRow]]) -> Iterator[Tokenized]:
        """What becomes of each source's number and row, in their order; ids and labels are [T] int32 arrays."""
        if self._workers is None:
            yield from (_tokenize(self._tokenizers, row) for row in rows)
            return
        rows = iter(rows)
        under_way: deque[tuple[list[tuple[int, RawRow]], Future[list[Tokenized]] | None]] = deque()
        try:
            while True:
                while len(under_way) < 2 * self._num_workers and (chunk := list(islice(rows, CHUNK_ROWS))):
                    under_way.append((chunk, self._submit(chunk)))
                if not under_way:
                    return
                yield from self._result(*under_way.popleft())
        finally:
            for _, future in under_way:
                if future is not None:
                    future.cancel()

    def _submit(self, chunk: list[tuple[int, RawRow]]) -> Future[list[Tokenized]] | None:
        try:
            return self._workers.submit(_tokenize_chunk, chunk) if self._workers is not None else None
        except BrokenProcessPool:
            return None

    def _result(self, chunk: list[tuple[int, RawRow]], future: Future[list[Tokenized]] | None) -> list[Tokenized]:
        """A chunk's rows; of this process where the workers are gone, for they are the same."""
        try:
            if future is not None:
                results = future.result()
                if len(results) < len(chunk):
                    raise CancelledError  # another thread closed the pool
                return results
        except BrokenProcessPool:
            if self._workers is not None:
                logger.warning("a data worker was ended from outside (short of memory?); this process tokenizes alone")
                self.close()
        return [_tokenize(self._tokenizers, row) for row in chunk]

    def close(self) -> None:
        """End the workers; those at work end with their row."""
        if self._workers is not None:
            self._workers = None
            self._end()

    def __enter__(self) -> "TokenizerPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def tokenize_all(tokenizer: Tokenizing, rows: Iterable[RawRow], *, num_workers: int) -> Iterator[Tokenized]:
    """What becomes of each row of one source; see `TokenizerPool`."""
    with TokenizerPool([tokenizer], num_workers=num_workers) as pool:
        yield from pool.tokenize((0, row) for row in rows)


def _tokenize(tokenizers: Sequence[Tokenizing], row: tuple[int, RawRow]) -> Tokenized:
    source, raw = row
    result = tokenizers[source](raw)
    return result if isinstance(result, BadRow) else [_compact(part) for part in result]


def _compact(row: TokenRow) -> TokenRow:
    return {key: np.asarray(value, np.int32) if isinstance(value, list) else value for key, value in row.items()}


def _end_workers(workers: ProcessPoolExecutor, stop: c_byte) -> None:
    stop.value = 1
    workers.shutdown(cancel_futures=True)


# ---- in a worker

_tokenizers: Sequence[Tokenizing] = ()
_stop = c_byte(0)


def _start_worker(tokenizers: Sequence[Tokenizing], stop: c_byte) -> None:
    global _tokenizers, _stop
    _tokenizers, _stop = tokenizers, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A worker holds both ends of the pipe that it reads, so it would wait for a killed parent forever.
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _tokenize_chunk(rows: list[tuple[int, RawRow]]) -> list[Tokenized]:
    return [_tokenize(_tokenizers, row) for row in rows if not _stop.value]
