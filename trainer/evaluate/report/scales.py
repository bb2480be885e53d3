"""Axes: where values fall, where ticks stand, and numbers as people write them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_TINY = 1e-290
"""Below it products lose their digits."""


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`; linear, or of logarithms."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def of(cls, values: Sequence[float], *, log: bool = False, from_zero: bool = False) -> "Scale":
        """An axis that holds finite values, with some air; log is ignored where one of them is not above 0."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        if log and low > _TINY:
            return cls(low / 1.15, high * 1.15, log=True)
        low = min(0.0, low) if from_zero else low
        air = 0.06 * (high - low) or 0.06 * abs(high)
        air = air if air > _TINY else 1.0
        return cls(low if from_zero and low == 0 else low - air, high + air)

    def share(self, value: float) -> float:
        """Where a value lies between the ends: 0..1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values between the ends, at most so many."""
        if self.log:
            return _thinned(_log_ticks(self.low, self.high), most)
        step = _step(self.high - self.low, most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [place * step for place in range(first, last + 1)]


def _step(span: float, most: int) -> float:
    """1, 2 or 5 times a power of ten, so that at most so many lie in the span."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= most)


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if high <= 1000 * low else (1,)
    return [tick for decade in decades for factor in factors if low <= (tick := factor * 10.0**decade) <= high]


def _thinned(ticks: list[float], most: int) -> list[float]:
    return ticks[:: -(-len(ticks) // most)] if ticks else []


def number(value: float | None) -> str:
    """Four digits or so: 0.00125, 2.589, 12,300, 1.2e-05."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-3:
        return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-")
    if size >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.{4 if size < 1 else 3 if size < 10 else 2 if size < 100 else 1}f}"
    return (text.rstrip("0").rstrip(".") or "0") if "." in text else text


def duration(seconds: float) -> str:
    """43 s, 3 min 25 s, 2 h 5 min."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s" if seconds < 10 else f"{rest} s"


def size(num_bytes: float) -> str:
    """1.38 GiB, 20 MiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.0f} MiB"
