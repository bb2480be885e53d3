"""Hashes of stretches of tokens, all at once: which documents, prompts and runs of tokens are equal.

A stretch's hash is a polynomial in an odd base modulo 2^64, so that every stretch of a chunk is a difference of two
prefix sums, whatever its length (Karp and Rabin, 1987). Tokens are mixed first: polynomials modulo a power of two are
weak on regular sequences of small numbers.
"""

import numpy as np

from trainer.data.inspection.chunks import Chunk

BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(BASE, -1, 1 << 64)


def stretch_hashes(ids: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """[S] uint64: equal for equal stretches.

    ids           [T] int32
    starts, ends  [S] int64, 0 <= start <= end <= T
    """
    powers = _powers(BASE, len(ids) + 1)
    sums = np.zeros(len(ids) + 1, np.uint64)
    np.cumsum(_mixed(ids.astype(np.uint64) + np.uint64(1)) * powers[:-1], out=sums[1:])
    shifted = (sums[ends] - sums[starts]) * _powers(_INVERSE, len(ids) + 1)[starts]
    return _mixed(shifted + (ends - starts).astype(np.uint64))


def document_hashes(chunk: Chunk) -> np.ndarray:
    """[D] uint64"""
    return stretch_hashes(chunk.ids, chunk.starts[:-1], chunk.starts[1:])


def prompt_hashes(chunk: Chunk) -> np.ndarray:
    """[D] uint64: of what stands before each document's first target."""
    return stretch_hashes(chunk.ids, chunk.starts[:-1], chunk.starts[:-1] + chunk.first_target)


def run_hashes(chunk: Chunk, run_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Of every run of `run_len` tokens within a document.

    returns  hashes [W] uint64, and each run's first token [W] int64
    """
    is_start = np.ones(len(chunk.ids) + 1, bool)
    for end, start in zip(chunk.starts[1:].tolist(), chunk.starts[:-1].tolist(), strict=True):
        is_start[max(start, end - run_len + 1) : end] = False
    starts = np.flatnonzero(is_start[:-1])
    return stretch_hashes(chunk.ids, starts, starts + run_len), starts


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _powers(base: int, count: int) -> np.ndarray:
    """[count] uint64: base^0, base^1, ... modulo 2^64."""
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, out=factors)
