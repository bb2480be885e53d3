"""How many rows an epoch takes of each source, and which: exact counts, no draws.

Source i is one endless sequence of its own cycles, each shuffled anew, and epoch e takes the next piece of it:

    cycle 0 | cycle 1 | cycle 2 | ...     every row once in each
    --e 0--|--e 1--|--e 2--|--e 3--|      so no row is seen twice before all of its source were seen once

The rows of an epoch are then shuffled together. A cycle that lies whole in one epoch needs no order of its own for
that, so one source that is passed once an epoch costs, and orders, what it would without any mixing; and sources
without weights are as one file of all their rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from trainer.config.data import MixUntil, SourceConfig
from trainer.config.errors import require
from trainer.data.ordering.permutation import FIRST_SOURCE, permutation

MAX_EPOCH_ROWS = 1 << 31
"""Rows of an epoch of a mix: 16 GiB of row numbers. Weights far from the sources' sizes get there unintended."""


@dataclass(frozen=True)
class MixPlan:
    """Which rows each epoch takes; rows are numbered over the sources, one after the other."""

    sizes: tuple[int, ...]
    """Rows of each source."""
    shares: tuple[Fraction, ...]
    """Rows that an epoch takes of each source; a fraction where `epochs` is one, rounded so that the sum is exact."""

    def counts(self, epoch: int) -> list[int]:
        """Rows that `epoch` takes of each source."""
        return [self._first(source, epoch + 1) - self._first(source, epoch) for source in range(len(self.sizes))]

    def num_rows(self, epoch: int) -> int:
        """Rows of `epoch`."""
        return sum(self.counts(epoch))

    def rows(self, epoch: int, *, seed: int, shuffle: bool) -> np.ndarray:
        """The rows of an epoch in order.

        shuffle  false: each source in its own order, interleaved by their counts
        returns  [num_rows(epoch)] int64, in 0..sum(sizes) - 1
        """
        pieces = [self._piece(source, epoch, seed, shuffle) for source in range(len(self.sizes))]
        rows = np.concatenate(pieces)
        if shuffle:
            return rows[permutation(len(rows), seed=seed, epoch=epoch)]
        return rows[_interleaved([len(piece) for piece in pieces])]

    def _first(self, source: int, epoch: int) -> int:
        """Where `epoch` starts in the source's sequence; rounded up, so that the first epoch has every source."""
        return math.ceil(epoch * self.shares[source])

    def _piece(self, source: int, epoch: int, seed: int, shuffle: bool) -> np.ndarray:
        """[counts(epoch)[source]] row numbers"""
        size, first, end = self.sizes[source], self._first(source, epoch), self._first(source, epoch + 1)
        pieces = [np.empty(0, dtype=np.int64)]
        while first < end:
            cycle, inside = divmod(first, size)
            stop = min(size, inside + end - first)
            whole = stop - inside == size
            if whole or not shuffle:
                pieces.append(np.arange(inside, stop))
            else:
                pieces.append(permutation(size, seed=seed, epoch=cycle, stream=FIRST_SOURCE + source)[inside:stop])
            first += stop - inside
        return np.concatenate(pieces) + sum(self.sizes[:source])


def plan_mix(
    sizes: Sequence[int], sources: Sequence[SourceConfig], *, until: MixUntil, temperature: float = 1.0
) -> MixPlan:
    """How much of each source an epoch takes.

    sizes        rows of each source
    until        weights: all, an epoch in which no source is seen less than once; first, one in which none is seen
                 more than once
    temperature  weights are taken to the power of 1 / temperature; without weights, the sizes, unless it is 1
    raises       UserError for a source without rows, or an epoch of 2**31 rows
    """
    for size, source in zip(sizes, sources, strict=True):
        require(size > 0, f"data.mix: path={source.path or source.source.value} has no rows; leave it out")
    weights = [
        source.weight if source.weight is not None else size for size, source in zip(sizes, sources, strict=True)
    ]
    if any(source.weight is not None for source in sources) or temperature != 1:
        shares = _weighted(sizes, weights, until, temperature)
    else:
        epochs = [1 if source.epochs is None else _exact(source.epochs) for source in sources]
        shares = [size * passes for size, passes in zip(sizes, epochs, strict=True)]
    total = math.ceil(sum(shares))
    require(
        total < MAX_EPOCH_ROWS,
        f"data.mix: an epoch of these sources of {list(sizes)} rows would have {total:.2g} rows; "
        "give weights that are closer to the sizes, fewer epochs, or data.mix_until=first",
    )
    return MixPlan(tuple(sizes), tuple(map(Fraction, shares)))


def _weighted(sizes: Sequence[int], weights: Sequence[float], until: MixUntil, temperature: float) -> list[int]:
    """Whole rows by largest remainder, and of each source one at least."""
    heaviest = max(weights)
    powers = [_exact((weight / heaviest) ** (1 / temperature) if temperature != 1 else weight) for weight in weights]
    scale = (min if until is MixUntil.first else max)(size / power for size, power in zip(sizes, powers, strict=True))
    quotas = [power * scale for power in powers]
    counts = [max(1, math.floor(quota)) for quota in quotas]
    missing = round(sum(quotas)) - sum(map(math.floor, quotas))
    by_remainder = sorted(range(len(quotas)), key=lambda source: math.floor(quotas[source]) - quotas[source])
    for source in by_remainder[:missing]:
        counts[source] = math.floor(quotas[source]) + 1
    return counts


def _exact(value: float) -> Fraction:
    """The number as a person writes it: 0.1 is a tenth; and one whose last bits depend on the machine is one number."""
    return Fraction(f"{value:.12g}")


def _interleaved(counts: Sequence[int]) -> np.ndarray:
    """Places of pieces laid one after the other: row j of c stands at (2j + 1) / 2c of the whole, the first at equals.

    So each source is at every moment within half a row of its share of the time passed.
    """
    moments = [(2 * np.arange(count) + 1) / (2 * count) for count in counts]
    return np.argsort(np.concatenate(moments), kind="stable")
