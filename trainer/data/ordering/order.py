"""The order of a run's data: which rows each epoch takes, mixed, packed or by length, as a function of (seed, epoch).

      MixPlan.rows       rows of the epoch, shuffled          4 1 0 3 2 5 6
      pack or group      units of a step                      [4 1] [0] [3 2 5] [6]      [0] [3 2 5] [6] [4 1]

A unit is what `train.batch_size` counts: a row, or with data.packing several in one. Nothing here has a state. What is
kept is kept for speed: the newest few epochs, and how many units each epoch has.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from trainer.config.data import DataConfig
from trainer.data.ordering.grouping import group
from trainer.data.ordering.mixing import plan_mix
from trainer.data.ordering.packing import Units, pack, single
from trainer.data.ordering.permutation import UNITS, permutation

KEPT_EPOCHS = 3
"""A step spans two epochs at most, unless it is longer than an epoch."""


class RunOrder:
    """The order of a run's data; rows are numbered over the sources, one after the other."""

    def __init__(
        self,
        sizes: Sequence[int],
        lengths: np.ndarray,
        config: DataConfig,
        seed: int,
        rows_per_step: int,
        *,
        capacity: int | None = None,
    ) -> None:
        """sizes: rows of each of `config.sources()`; lengths: [sum(sizes)] int, tokens of each row

        seed           chooses the order; 0..2**32 - 1
        rows_per_step  units of a full step, over all ranks
        capacity       packing: tokens of a unit; `config.max_seq_len`, unless rows are pairs
        raises         ValueError where the numbers do not fit each other, and for a row longer than capacity
        """
        sources = config.sources()
        if len(sizes) != len(sources) or sum(sizes) != len(lengths):
            raise ValueError(
                f"{len(sizes)} sizes of {sum(sizes)} rows, {len(sources)} sources, {len(lengths)} lengths; "
                "give a size a source and a length a row"
            )
        if rows_per_step < 1:
            raise ValueError(f"rows_per_step={rows_per_step}; give at least 1")
        self.seed, self.num_rows, self.rows_per_step = seed, len(lengths), rows_per_step
        self.capacity = capacity or config.max_seq_len
        self._lengths, self._config = np.asarray(lengths), config
        self._mix = plan_mix(sizes, sources, until=config.mix_until, temperature=config.mix_temperature)
        self._firsts = [0]  # the number of units before epoch 0, 1, ..., as far as anyone asked
        self._kept = lru_cache(maxsize=KEPT_EPOCHS)(self._make_epoch)

    def epoch(self, epoch: int) -> Units:
        """The units of an epoch, in order."""
        return self._kept(epoch)

    def _make_epoch(self, epoch: int) -> Units:
        rows = self._mix.rows(epoch, seed=self.seed, shuffle=self._config.shuffle)
        if self._config.packing:
            return self._packed(rows, epoch)
        if self._config.group_by_length:
            head = -self.first_unit(epoch) % self.rows_per_step
            rows = group(self._lengths, rows, self.rows_per_step, seed=self.seed, epoch=epoch, head=head)
        return single(rows)

    def _packed(self, rows: np.ndarray, epoch: int) -> Units:
        places = pack(self._lengths[rows], self.capacity)
        units = Units(rows[places.rows], places.starts)
        if not self._config.shuffle:
            return units
        # By their first rows units with many, short rows would come first.
        return units.take(permutation(len(units), seed=self.seed, epoch=epoch, stream=UNITS))

    def num_units(self, epoch: int) -> int:
        """Units of an epoch; 0 in some epochs of a few rows that are passed less than once an epoch."""
        return self.first_unit(epoch + 1) - self.first_unit(epoch)

    def first_unit(self, epoch: int) -> int:
        """Units of all epochs before."""
        while len(self._firsts) <= epoch:
            self._firsts.append(self._firsts[-1] + self._count(len(self._firsts) - 1))
        return self._firsts[epoch]

    def _count(self, epoch: int) -> int:
        return len(self.epoch(epoch)) if self._config.packing else self._mix.num_rows(epoch)

    def place(self, position: int) -> tuple[int, int]:
        """Epoch, and unit in it, of the run's unit `position`."""
        while self._firsts[-1] <= position:
            self.first_unit(len(self._firsts))
        epoch = bisect_right(self._firsts, position) - 1
        return epoch, position - self._firsts[epoch]

    def efficiency(self, epoch: int = 0) -> float:
        """Share of an epoch's units that is tokens and not filling, 0..1."""
        units = self.epoch(epoch)
        return float(self._lengths[units.rows].sum() / (len(units) * self.capacity))
