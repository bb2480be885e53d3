"""What a run trains on that it is also held to.

Three kinds, from the plain to the hidden: the held-out row itself, its prompt with another answer, and a long run of
its tokens inside another row. Copies are dropped before training (dataset.py); the others are only told. A run that
stands in many training rows is a shared instruction and no leak; it is told apart.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset

from trainer.data.inspection.chunks import chunks, origins
from trainer.data.inspection.hashing import prompt_hashes, run_hashes

RUN_LEN = 50
"""Tokens; Carlini et al. (arXiv:2107.06499) call runs of this length copied."""
SHARED_ROWS, SHARED_PART = 3, 0.1
"""A run that stands in at least so many training rows, and in this part of them, is an instruction."""
MAX_LISTED = 100
_FILTER_BITS = 24


@dataclass(frozen=True)
class Leak:
    held_out: str
    """Where the held-out row stands."""
    train: str
    """Where a training row stands that holds the same."""
    tokens: int
    """How many tokens, one after the other, are the same."""
    held_out_row: int
    """Its number in the held-out table."""


@dataclass
class Leaks:
    """Rows of the held-out set that training sees something of."""

    held_out_rows: int = 0
    copies: int = 0
    """Training rows that equal a held-out row; they are dropped."""
    copied: list[str] = field(default_factory=list)
    """The first of their places."""
    prompt_rows: int = 0
    """Held-out rows whose prompt has another answer in training."""
    prompts: list[Leak] = field(default_factory=list)
    run_len: int = RUN_LEN
    run_rows: int = 0
    """Held-out rows that share a run of at least `run_len` tokens with a training row."""
    runs: list[Leak] = field(default_factory=list)
    instruction_rows: int = 0
    """Held-out rows with a run that so many training rows have that it is an instruction."""

    @property
    def run_share(self) -> float:
        return self.run_rows / self.held_out_rows if self.held_out_rows else 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"run_share": round(self.run_share, 4)}


def find_leaks(train: Dataset, held_out: Dataset, *, prompts: bool = True, run_len: int = RUN_LEN) -> Leaks:
    """Look for held-out prompts and runs of tokens in training rows; one pass over each table for each kind.

    train, held_out  `input_ids`, `labels`, `origin`, of pairs also the rejected ones
    prompts          false where a prompt's tokens are targets too, so that nobody can tell where it ends
    """
    leaks = Leaks(len(held_out), run_len=run_len)
    if len(train) and len(held_out):
        if prompts:
            _prompt_leaks(train, held_out, leaks)
        _run_leaks(train, held_out, leaks)
    return leaks


# ---- the same prompt


def _prompt_leaks(train: Dataset, held_out: Dataset, leaks: Leaks) -> None:
    prompts = _prompts(held_out)
    found: dict[int, int] = {}
    wanted = np.array(list(prompts), np.uint64)
    for chunk in chunks(train):
        hashes = prompt_hashes(chunk)
        for place in np.flatnonzero(np.isin(hashes, wanted)):
            found.setdefault(int(hashes[place]), int(chunk.rows[place]))
    rows = {row: (found[key], tokens) for key, held in prompts.items() if key in found for row, tokens in held}
    leaks.prompt_rows = len(rows)
    leaks.prompts = _listed(train, held_out, [(row, *rows[row]) for row in sorted(rows)])


def _prompts(rows: Dataset) -> dict[int, list[tuple[int, int]]]:
    """Hash of a prompt -> the rows that have it, and its tokens. A text has none: its first token is no prompt."""
    prompts: dict[int, list[tuple[int, int]]] = {}
    for chunk in chunks(rows):
        lengths = chunk.first_target
        for place, key in enumerate(prompt_hashes(chunk).tolist()):
            if 1 < lengths[place] < chunk.lengths[place]:
                prompts.setdefault(key, []).append((int(chunk.rows[place]), int(lengths[place])))
    return prompts


def _listed(train: Dataset, held_out: Dataset, found: list[tuple[int, int, int]]) -> list[Leak]:
    """found: row of the held-out table, row of the training table, tokens"""
    found = found[:MAX_LISTED]
    held = origins(held_out, np.array([row for row, _, _ in found], np.int64))
    seen = origins(train, np.array([row for _, row, _ in found], np.int64))
    return [Leak(one, other, tokens, row) for one, other, (row, _, tokens) in zip(held, seen, found, strict=True)]


# ---- the same run of tokens


def _run_leaks(train: Dataset, held_out: Dataset, leaks: Leaks) -> None:
    runs = _HeldOutRuns(held_out, leaks.run_len)
    first_row, num_rows = _occurrences(train, runs)
    is_shared = (num_rows >= SHARED_ROWS) & (num_rows > SHARED_PART * len(train))
    longest: dict[int, tuple[int, int, int]] = {}
    instructed: set[int] = set()
    for row, which in runs.documents():
        is_held = num_rows[which] > 0
        if (is_held & is_shared[which]).any():
            instructed.add(row)
        num_runs, place = _longest(is_held & ~is_shared[which])
        if num_runs and num_runs + leaks.run_len - 1 > longest.get(row, (0, 0, 0))[2]:
            longest[row] = row, int(first_row[which[place]]), num_runs + leaks.run_len - 1
    leaks.run_rows, leaks.instruction_rows = len(longest), len(instructed)
    leaks.runs = _listed(train, held_out, sorted(longest.values(), key=lambda found: (-found[2], found[0])))


def _occurrences(train: Dataset, runs: "_HeldOutRuns") -> tuple[np.ndarray, np.ndarray]:
    """Of each held-out run [H]: the first training row that has it, and in how many documents it stands."""
    first_row = np.full(len(runs.hashes), -1, np.int64)
    num_rows = np.zeros(len(runs.hashes), np.int64)
    for chunk in chunks(train) if len(runs.hashes) else ():
        hashes, starts = run_hashes(chunk, runs.run_len)
        which, places = runs.find(hashes)
        documents = np.searchsorted(chunk.starts, starts[places], side="right") - 1
        which, documents = np.unique(np.stack([which, documents]), axis=1)
        found, place, counts = np.unique(which, return_index=True, return_counts=True)
        first_row[found] = np.where(first_row[found] < 0, chunk.rows[documents[place]], first_row[found])
        num_rows[found] += counts
    return first_row, num_rows


class _HeldOutRuns:
    """Every run of the held-out rows, to be looked for."""

    def __init__(self, rows: Dataset, run_len: int) -> None:
        """run_len: tokens"""
        self._rows, self.run_len = rows, run_len
        parts = [run_hashes(chunk, run_len)[0] for chunk in chunks(rows)]
        self.hashes = np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.uint64)
        """[H] uint64, sorted."""
        self._filter = np.zeros(1 << _FILTER_BITS, bool)
        self._filter[self._short(self.hashes)] = True

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of `hashes` are held out: their places in `self.hashes`, and in `hashes`."""
        maybe = np.flatnonzero(self._filter[self._short(hashes)])
        which = np.minimum(np.searchsorted(self.hashes, hashes[maybe]), len(self.hashes) - 1)
        is_equal = self.hashes[which] == hashes[maybe]
        return which[is_equal], maybe[is_equal]

    def documents(self) -> Iterator[tuple[int, np.ndarray]]:
        """Of each document its row, and its runs' places in `self.hashes`, in order."""
        for chunk in chunks(self._rows):
            hashes, starts = run_hashes(chunk, self.run_len)
            which = np.searchsorted(self.hashes, hashes)
            bounds = np.searchsorted(starts, chunk.starts)
            for row, first, end in zip(chunk.rows, bounds, bounds[1:], strict=False):
                yield int(row), which[first:end]

    @staticmethod
    def _short(hashes: np.ndarray) -> np.ndarray:
        return hashes >> np.uint64(64 - _FILTER_BITS)


def _longest(is_held: np.ndarray) -> tuple[int, int]:
    """The longest stretch of true: its length and first place; 0 where there is none."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_held, [False]]).astype(np.int8)))
    firsts, ends = edges[::2], edges[1::2]
    if not len(firsts):
        return 0, 0
    longest = int(np.argmax(ends - firsts))
    return int(ends[longest] - firsts[longest]), int(firsts[longest])
