"""Which loads a server gets, one after the other: the given rates, or a search for the last one that holds."""

import math
from collections.abc import Generator
from dataclasses import dataclass

from trainer.config.load import AUTO, LoadConfig

HALVINGS = 6


@dataclass(frozen=True)
class Load:
    """`rate` jobs a second (None: the trace's own times), or `places` jobs at a time."""

    rate: float | None
    places: int | None = None

    @property
    def name(self) -> str:
        """For the table; a closed loop says so."""
        if self.places is not None:
            return f"closed, {self.places} at a time"
        if self.rate is None:
            return "trace"
        return "all at once" if math.isinf(self.rate) else f"{self.rate:.4g}"


def loads(config: LoadConfig) -> Generator[Load, bool, None]:
    """The loads of one server; `send(held)` tells whether the last one was within the SLO."""
    if config.concurrency is not None:
        for places in config.places:
            yield Load(None, places)
    elif config.rate == AUTO:
        yield from _search(config)
    else:
        for rate in config.rates:
            yield Load(rate)


def _search(config: LoadConfig) -> Generator[Load, bool, None]:
    """Double until a rate fails (halve if the first one does), then bisect."""
    rate, low, high = config.start_rate, None, None
    while high is None and rate <= config.max_rate:
        if (yield Load(rate)):
            low, rate = rate, 2 * rate
        else:
            high = rate
    for _ in range(HALVINGS if low is None else 0):
        rate = high / 2
        if (yield Load(rate)):
            low = rate
            break
        high = rate
    for _ in range(config.bisections if low and high else 0):
        rate = (low + high) / 2
        if (yield Load(rate)):
            low = rate
        else:
            high = rate


def held(row: dict, config: LoadConfig) -> bool:
    """Whether a point kept the SLO and its queue did not grow."""
    return row["goodput"] is not None and row["goodput"] >= config.slo_share and row["saturated"] is not True
