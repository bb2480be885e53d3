"""Several documents in one row of up to `capacity` tokens, and batches of rows of similar length.

Both are made within windows of an epoch's order, so that which rows meet changes with the epoch and no epoch is sorted
by length as a whole. In a window rows are laid in the longest first, each where it leaves the least room (best-fit
decreasing). A window is at least `MIN_UNITS` packed rows long: its last one stays half empty.

Share of tokens that are no filling, 7648 texts of GSM8K and Self-Instruct (1..1166 tokens, 172 in the mean),
`python -m pytest tests/trainer/test_packing.py -s`:

    capacity    one text a row    in order (next-fit)    here    possible
    512         TODO
    2048
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from trainer.data.permutation import BATCHES, permutation

WINDOW_ROWS = 4096
MIN_UNITS = 256
WINDOW_STEPS = 50
"""Steps whose rows are sorted by length together."""


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
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= capacity:
        place = int(np.argmax((lengths < 1) | (lengths > capacity)))
        raise ValueError(f"row {place} has {lengths[place]} tokens; give rows of 1 to capacity={capacity}")
    unit_of = np.empty(len(lengths), dtype=np.int64)
    num_units = 0
    for window in _windows(lengths, capacity):
        num_units = _best_fit_decreasing(lengths[window], capacity, unit_of[window], num_units)
    rows = np.argsort(unit_of, kind="stable")
    units = Units(rows, np.concatenate([[0], np.cumsum(np.bincount(unit_of, minlength=num_units))]))
    return units.take(np.argsort(units.rows[units.starts[:-1]]))


def _windows(lengths: np.ndarray, capacity: int) -> list[slice]:
    """Equal pieces of the order, of at least `WINDOW_ROWS` rows and `MIN_UNITS` units, as far as there are so many."""
    tokens = int(lengths.sum())
    num_windows = max(1, min(len(lengths) // WINDOW_ROWS, tokens // (MIN_UNITS * capacity)))
    bounds = [len(lengths) * window // num_windows for window in range(num_windows + 1)]
    return [slice(first, end) for first, end in zip(bounds, bounds[1:], strict=False)]


def _best_fit_decreasing(lengths: np.ndarray, capacity: int, unit_of: np.ndarray, num_units: int) -> int:
    """Writes each row's unit, numbered from `num_units`, into `unit_of`; returns the number behind the last."""
    room: list[int] = []  # sorted; of each unit that has room, the room and behind it the unit's number
    order = np.argsort(-lengths, kind="stable")
    found = []
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
    unit_of[order] = found
    return num_units


_NUMBER_BITS = 40
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1


# ---- batches of similar length


def group(
    lengths: np.ndarray, order: np.ndarray, unit_rows: int, *, seed: int, epoch: int, head: int = 0
) -> np.ndarray:
    """Put rows of similar length into one step.

    lengths    [R] int, tokens, by row number
    order      [N] int64, the rows of the epoch
    unit_rows  rows of a step
    head       rows that fill up the step in which the last epoch ended, so that later steps start with a batch
    returns    [N] int64: the head, batches in any order, and what is left over at the end; each sorted by length

    In epoch 0 the batch with the longest row comes first: memory runs out at once or never. Later epochs would gain
    nothing, and would each start with an untypical step.
    """
    if epoch == 0 and len(order) >= unit_rows:  # never among the rows that are left over
        order = order.copy()
        longest = int(np.argmax(lengths[order]))
        order[[0, longest]] = order[[longest, 0]]
    head = min(head, len(order))
    num_batches = (len(order) - head) // unit_rows
    end = head + num_batches * unit_rows
    cuts = [head, *range(head + WINDOW_STEPS * unit_rows, end, WINDOW_STEPS * unit_rows), end]
    windows = [_by_length(lengths, order[first:stop]) for first, stop in zip(cuts, cuts[1:], strict=False)]
    batches = np.concatenate(windows).reshape(num_batches, unit_rows)
    batches = batches[permutation(num_batches, seed=seed, epoch=epoch, stream=BATCHES)]
    if epoch == 0 and num_batches:
        longest = int(np.argmax(lengths[batches].max(axis=1)))
        batches[[0, longest]] = batches[[longest, 0]]
    return np.concatenate([_by_length(lengths, order[:head]), batches.ravel(), _by_length(lengths, order[end:])])


def _by_length(lengths: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return rows[np.argsort(lengths[rows], kind="stable")]
