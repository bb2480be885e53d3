"""Several documents in one row of up to `capacity` tokens: which rows make a unit.

Packing is done within windows of an epoch's order, so that which rows meet changes with the epoch, and no epoch is
sorted by length as a whole. A window is packed twice, and the better packing kept:

best fit     the longest row first, each where it leaves the least room; hard to beat where units hold many rows
by shapes    a unit is opened by the longest row that is left, and filled with the two that square to the most: long
             ones, and little room. What lengths it got is the shape of as many units as there are rows for.

Share of the units that is tokens, of 7466 and 7473 conversations of GSM8K (217 tokens in the mean, SmolLM2's template;
`python -m pytest tests/trainer/test_packing.py -k real -s` prints it):

    capacity    one row a unit    in order (next fit)    best fit    both     no packing exceeds
    512         0.423             0.770                  0.966       0.983    0.992, by linear programming
    2048        0.106             0.941                  0.988       0.990    0.999

A million rows take 0.5 to 4.5 s on one core, the more the fewer rows a unit holds. Runs that are resumed depend on what
is packed with what: a change here changes which rows their next step reads.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

WINDOW_ROWS = 8192
MIN_UNITS = 256
"""Units of a window, where rows are so short that `WINDOW_ROWS` fill fewer: its last one stays half empty."""
GRID = 1024
"""Lengths that shapes tell apart: each row is taken for up to capacity / GRID longer than it is."""


@dataclass(frozen=True)
class Units:
    """What a step is counted in: lists of rows, mostly of one row each where nothing is packed."""

    rows: np.ndarray
    """[R] int64"""
    starts: np.ndarray
    """[U + 1] int64: unit u has the rows starts[u] to starts[u + 1]."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, unit: int) -> list[int]:
        return self.rows[self.starts[unit] : self.starts[unit + 1]].tolist()

    def take(self, order: np.ndarray) -> "Units":
        """Units in another order; order [U] int64."""
        sizes = np.diff(self.starts)[order]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        places = np.repeat(self.starts[:-1][order] - starts[:-1], sizes) + np.arange(starts[-1])
        return Units(self.rows[places], starts)


def single(rows: np.ndarray) -> Units:
    """A unit for each row."""
    return Units(rows, np.arange(len(rows) + 1))


def pack(lengths: np.ndarray, capacity: int) -> Units:
    """Fill units with rows, each row in one.

    lengths   [R] int, tokens, in the order of the epoch
    capacity  tokens of a unit
    returns   places in `lengths`; in a unit in their order, and units in the order of their first rows
    raises    ValueError for a row longer than capacity, or empty
    """
    if not len(lengths):
        return single(lengths)
    if not 1 <= lengths.min() <= lengths.max() <= capacity:
        place = int(np.argmax((lengths < 1) | (lengths > capacity)))
        raise ValueError(f"row {place} has {lengths[place]} tokens; give rows of 1 to capacity={capacity}")
    unit_of = np.empty(len(lengths), dtype=np.int64)
    num_units = 0
    for window in _windows(lengths, capacity):
        packed = _pack_window(lengths[window], capacity)
        unit_of[window] = num_units + packed
        num_units += int(packed.max()) + 1
    rows = np.argsort(unit_of, kind="stable")
    units = Units(rows, np.concatenate([[0], np.cumsum(np.bincount(unit_of))]))
    return units.take(np.argsort(units.rows[units.starts[:-1]]))


def _windows(lengths: np.ndarray, capacity: int) -> list[slice]:
    """Equal pieces of the order, of at least `WINDOW_ROWS` rows and `MIN_UNITS` units, as far as there are so many."""
    tokens = int(lengths.sum())
    num_windows = max(1, min(len(lengths) // WINDOW_ROWS, tokens // (MIN_UNITS * capacity)))
    bounds = [len(lengths) * window // num_windows for window in range(num_windows + 1)]
    return [slice(first, end) for first, end in zip(bounds, bounds[1:], strict=False)]


def _pack_window(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Each row's unit [R] int64, in 0..units - 1."""
    best_fit = _best_fit(lengths, capacity)
    if best_fit.max() < -(-int(lengths.sum()) // capacity):
        return best_fit  # fewer there cannot be
    by_shapes = _by_shapes(lengths, capacity)
    return by_shapes if by_shapes.max() < best_fit.max() else best_fit


# ---- best fit


_NUMBER_BITS = 32
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1


def _best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Each row's unit [R] int64."""
    room: list[int] = []  # sorted: the room of a unit that has some, and behind it in the low bits its number
    order = np.argsort(-lengths, kind="stable")
    num_units, found = 0, []
    for length in lengths[order].tolist():
        place = bisect_left(room, length << _NUMBER_BITS)
        if place == len(room):
            left, unit = capacity, num_units
            num_units += 1
        else:
            entry = room.pop(place)
            left, unit = entry >> _NUMBER_BITS, entry & _NUMBER_MASK
        found.append(unit)
        if left > length:
            insort(room, left - length << _NUMBER_BITS | unit)
    unit_of = np.empty(len(lengths), dtype=np.int64)
    unit_of[order] = found
    return unit_of


# ---- by shapes


def _by_shapes(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Each row's unit [R] int64."""
    grain = -(-capacity // GRID)
    sizes = np.minimum(-(-lengths // grain), capacity // grain)
    by_size, counts = np.argsort(sizes, kind="stable"), np.bincount(sizes)
    firsts = np.cumsum(counts) - counts  # of each size, the next of `by_size`
    unit_of = np.empty(len(lengths), dtype=np.int64)
    num_units = 0
    for shape, times in _shapes(counts, capacity // grain):
        for size in shape:
            unit_of[by_size[firsts[size] : firsts[size] + times]] = range(num_units, num_units + times)
            firsts[size] += times
        num_units += times
    return unit_of


def _shapes(counts: np.ndarray, capacity: int) -> Iterator[tuple[list[int], int]]:
    """Sizes that fill a unit, and how many units get them, until no rows are left; counts [S] by size."""
    counts, longest = counts.copy(), len(counts) - 1
    while longest > 0:
        if not counts[longest]:
            longest -= 1
            continue
        shape = _shape(longest, counts.copy(), capacity)
        of_each, needed = np.unique(shape, return_counts=True)
        times = int((counts[of_each] // needed).min())
        counts[of_each] -= times * needed
        yield shape, times


def _shape(longest: int, counts: np.ndarray, capacity: int) -> list[int]:
    """Sizes of a unit whose first row is the longest; takes them out of counts."""
    shape, room, picked = [], capacity, [longest]
    while picked:
        for size in picked:
            counts[size] -= 1
            room -= size
        shape += picked
        picked = _fill(np.flatnonzero(counts[: room + 1]), counts, room)
    return shape


def _fill(sizes: np.ndarray, counts: np.ndarray, room: int) -> list[int]:
    """Which one or two of the sizes, ascending, go into a room next; none where none fits."""
    if not len(sizes):
        return []
    if room >= 2 * sizes[-1]:
        return [int(sizes[-1])]
    place = np.searchsorted(sizes, room - sizes, side="right") - 1  # of each size, the largest that fits beside it
    place -= (place == np.arange(len(sizes))) & (counts[sizes] < 2)
    beside = np.where(place >= 0, sizes[place], 0)
    best = len(sizes) - 1 - int(np.argmax((sizes**2 + beside**2)[::-1]))
    return [int(size) for size in (sizes[best], beside[best]) if size]
