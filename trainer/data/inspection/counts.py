"""How many and how long: rows, tokens, targets, percentiles, a histogram, and rows that say the same."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset

from trainer.data.inspection.chunks import chunks, document_lengths, origins, sides
from trainer.data.inspection.hashing import document_hashes

PERCENTILES = (1, 25, 50, 75, 90, 95, 99)
NUM_BARS = 40
MAX_LISTED = 100


@dataclass(frozen=True)
class Lengths:
    """Tokens of documents: rows, or of pairs each side."""

    total: int
    shortest: int
    mean: float
    percentiles: dict[int, int]
    longest: int
    longest_origin: str
    bars: list[tuple[int, int, int]]
    """[first, end) tokens and how many documents are so long: a histogram of equal steps."""

    def as_dict(self) -> dict[str, Any]:
        shown = {f"p{percent}": tokens for percent, tokens in self.percentiles.items()}
        return {"shortest": self.shortest, "mean": round(self.mean, 1), **shown, "longest": self.longest} | {
            "longest_origin": self.longest_origin
        }


def count_lengths(rows: Dataset) -> Lengths:
    """rows  at least one"""
    by_side = [document_lengths(rows, side) for side in sides(rows)]
    lengths = np.concatenate(by_side)
    longest = int(np.argmax(lengths))
    (origin,) = origins(rows, np.array([longest % len(rows)]))
    values = np.percentile(lengths, PERCENTILES, method="higher").tolist()
    return Lengths(
        *(int(lengths.sum()), int(lengths.min()), float(lengths.mean())),
        dict(zip(PERCENTILES, map(int, values), strict=True)),
        *(int(lengths[longest]), origin, bars_of(lengths)),
    )


def bars_of(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """A histogram of equal steps, as `Lengths.bars`; lengths [D] int64, one at least."""
    width = max(1, -(-int(lengths.max() + 1) // NUM_BARS))
    counts = np.bincount(lengths // width)
    return [(place * width, (place + 1) * width, int(count)) for place, count in enumerate(counts)]


def count_targets(rows: Dataset) -> int:
    """Tokens that are learned."""
    return sum(int(np.count_nonzero(chunk.is_target)) for chunk in chunks(rows))


# ---- rows that are the same


@dataclass(frozen=True)
class Duplicates:
    """Rows of tokens that equal an earlier one."""

    rows: np.ndarray
    """[N] int64, in order"""
    firsts: np.ndarray
    """[N] int64: the first row that each equals."""
    groups: list[list[str]]
    """Where equal rows stand, the largest groups first; at most `MAX_LISTED` groups of ten places each."""


def row_hashes(rows: Dataset) -> np.ndarray:
    """[len(rows)] uint64: equal where the tokens are, of pairs both sides'."""
    hashes = np.zeros(len(rows), np.uint64)
    for chunk in chunks(rows):
        hashes[chunk.first_row : chunk.first_row + len(chunk)] *= np.uint64(3)
        hashes[chunk.first_row : chunk.first_row + len(chunk)] += document_hashes(chunk)
    return hashes


def find_duplicates(rows: Dataset) -> Duplicates:
    """Rows whose tokens all equal an earlier row's."""
    _, firsts, inverse, counts = np.unique(row_hashes(rows), return_index=True, return_inverse=True, return_counts=True)
    first_of = firsts[inverse]
    again = np.flatnonzero(first_of != np.arange(len(rows)))
    largest = np.argsort(-counts, kind="stable")[:MAX_LISTED]
    groups = [np.flatnonzero(inverse == group)[:10] for group in largest if counts[group] > 1]
    return Duplicates(again, first_of[again], [origins(rows, group) for group in groups])
