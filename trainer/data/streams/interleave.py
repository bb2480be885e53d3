"""Which source of a stream gives the next raw row: a function of counts, without draws.

    weights       the source that lags most behind its share, the first of equals       a b a a b a | a b a a b a
    no weights    one source after the other, each passed `epochs` times                a a a a b b | a a a a b b
                                                                                                    a new epoch
Sizes are unknown, so an end is met, not foreseen. With `mix_until=first` the first source that ends, ends the epoch;
with `all` a source that ends starts over, until each was passed whole. A fraction of a pass takes rows that are spread
evenly over it, others in each epoch. All that a resumed run needs are counts and each source's place.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from trainer.config.data import DataConfig, MixUntil, SourceConfig
from trainer.config.errors import require
from trainer.data.reading.raw_rows import Position, RawRow, Reader


class HeldOut(NamedTuple):
    """The beginning of a source, which is not trained on."""

    behind: Position
    """Each pass begins here."""
    rows: int
    """How many rows that leaves out; they count in `max_rows`."""


@dataclass
class _Place:
    """How far a source was read."""

    position: Position | None = None
    """Behind the newest row of the pass; None at its beginning."""
    read: int = 0
    """Rows read in this pass."""
    passes: int = 0
    """Whole passes in this epoch."""
    taken: int = 0
    """Rows taken in this epoch."""


class Interleave:
    """The raw rows of all sources, endlessly, with what it takes to go on from any of them."""

    def __init__(
        self, readers: Sequence[Reader], config: DataConfig, *, skip: dict[int, HeldOut] | None = None
    ) -> None:
        """readers: of each of `config.sources()`; skip: by source, what is held out of its beginning

        raises   UserError for a mix that needs the sources' sizes, which a stream does not know
        """
        self._readers, self._sources, self._skip = list(readers), config.sources(), skip or {}
        self._until = config.mix_until
        self._weights = _weights(self._sources, config.mix_temperature)
        self._epochs = [Fraction(f"{1.0 if source.epochs is None else source.epochs:.12g}") for source in self._sources]
        self._whole_passes = [math.floor(epochs) for epochs in self._epochs]
        self._most_passes = [math.ceil(epochs) for epochs in self._epochs]
        self._limits = [self._limit(index, source) for index, source in enumerate(self._sources)]
        self._rows: dict[int, Iterator[RawRow]] = {}
        self.epoch = 0
        """Of the next row, unless there is none left."""
        self._places = [_Place() for _ in self._sources]

    def _limit(self, index: int, source: SourceConfig) -> float:
        if source.max_rows is None:
            return math.inf
        limit = source.max_rows - (self._skip[index].rows if index in self._skip else 0)
        require(
            limit > 0,
            f"{self._readers[index].name}: max_rows={source.max_rows} rows are all held out; raise it, or lower "
            "data.eval_rows",
        )
        return limit

    def next_row(self) -> tuple[int, RawRow] | None:
        """The next source's number and row; None when the epoch is over, whereupon the next call begins another.

        raises   UserError for a source without a row
        """
        while (source := self._choose()) is not None:
            if (row := self._read(source)) is not None:
                return source, row
        self._places = [_Place() for _ in self._sources]
        self._rows.clear()
        self.epoch += 1
        return None

    def _choose(self) -> int | None:
        """The source that gives the next row, if it has one left; None when the epoch is over."""
        places = self._places
        if self._weights is None:
            # a fraction of a pass is read to its end too
            return next((i for i, place in enumerate(places) if place.passes < self._most_passes[i]), None)
        ended = [place.passes > 0 for place in places]
        if all(ended) or (self._until is MixUntil.first and any(ended)):
            return None
        now = sum(place.taken for place in places) + 1
        lags = [weight * now - place.taken for weight, place in zip(self._weights, places, strict=True)]
        return lags.index(max(lags))

    def _read(self, source: int) -> RawRow | None:
        """The source's next row that is taken; None when its pass is over."""
        place = self._places[source]
        while (row := self._next_of(source, place)) is not None:
            taken = self._is_taken(source, place)
            place.position = row.behind
            place.read += 1
            place.taken += taken
            if taken:
                return row
        behind = ", behind those held out" if source in self._skip else ""
        require(
            place.read > 0,
            f"{self._readers[source].name} holds no rows{behind}; give at least one that can be trained on",
        )
        self._places[source] = _Place(passes=place.passes + 1, taken=place.taken)
        self._rows.pop(source, None)
        return None

    def _next_of(self, source: int, place: _Place) -> RawRow | None:
        if place.read >= self._limits[source]:
            return None
        if source not in self._rows:
            start = self._skip[source].behind if source in self._skip else None
            self._rows[source] = self._readers[source].raw(place.position or start)
        return next(self._rows[source], None)

    def _is_taken(self, source: int, place: _Place) -> bool:
        """Whether a row belongs to this epoch: in a fraction of a pass, an even share, that moves on with the epoch."""
        if self._weights is not None or place.passes < self._whole_passes[source]:
            return True
        fraction = self._epochs[source] - place.passes
        number = place.read + self.epoch
        return math.ceil((number + 1) * fraction) > math.ceil(number * fraction)

    def state(self) -> dict[str, Any]:
        """Where to go on; goes through JSON."""
        return {"epoch": self.epoch, "sources": [asdict(place) for place in self._places]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state()` was taken."""
        then, now = len(state["sources"]), len(self._sources)
        require(then == now, f"data.mix has {now} sources, and this run had {then}; restore them, or start a new run")
        self.close()
        self.epoch = state["epoch"]
        self._places = [_Place(**place) for place in state["sources"]]

    def close(self) -> None:
        """Let go of open files."""
        self._rows.clear()


def _weights(sources: Sequence[SourceConfig], temperature: float) -> list[float] | None:
    """Each source's share of the rows, summing to 1; None where sources follow one another."""
    weights = [source.weight for source in sources if source.weight is not None]
    if not weights:
        require(
            temperature == 1 or len(sources) == 1,
            f"data.mix_temperature={temperature} needs the sizes of sources without a weight, which a stream does not "
            "know; give each source of data.mix a weight, or set data.streaming=false",
        )
        return None
    heaviest = max(weights)
    powers = [(weight / heaviest) ** (1 / temperature) for weight in weights]
    return [power / sum(powers) for power in powers]
