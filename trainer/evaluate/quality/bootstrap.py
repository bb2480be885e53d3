"""Bootstrap intervals: what a figure would be on other rows of the same kind.

Rows (windows, prompts, questions) are drawn with replacement as wholes, since tokens of one window are no independent
draws. All figures of an evaluation are taken on the same draws, so that a difference of two models is a paired one.

The plain percentile interval is too short for few rows. It is widened here to the quantiles that make it as long as
Student's, for a mean of normal values (the expanded percentile interval: Hesterberg, arXiv:1411.5279).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist

import numpy as np

MIN_ROWS = 4
"""Fewer rows give no interval: three draws say nothing of what a fourth would be."""
CONFIDENCE = 0.95
_AT_A_TIME = 64  # samples whose weights of tokens are held at once

Statistic = Callable[[np.ndarray], np.ndarray]
"""[S, N] how often each row is counted in each sample -> [S] the figure."""


@dataclass(frozen=True)
class Interval:
    """A figure and its 95 % bounds; None without one: too few rows, or a figure that no sample bounds."""

    value: float
    low: float | None = None
    high: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        return {name: _finite(value) for name, value in asdict(self).items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class Resampler:
    """The draws of an evaluation: the same ones for every figure over the same rows."""

    def __init__(self, num_rows: int, *, resamples: int = 2000, seed: int = 0) -> None:
        if num_rows < 1:
            raise ValueError("there is no row to draw from")
        generator = np.random.default_rng([seed, num_rows])
        self.num_rows = num_rows
        self.counts = generator.multinomial(num_rows, np.full(num_rows, 1 / num_rows), size=resamples).astype(float)
        """[S, N]"""

    def interval(self, statistic: Statistic) -> Interval:
        """The figure of all rows, and bounds from its values on the draws; draws without a value do not count."""
        value = float(statistic(np.ones((1, self.num_rows)))[0])
        if self.num_rows < MIN_ROWS or not math.isfinite(value):
            return Interval(value)
        found = statistic(self.counts)
        found = found[np.isfinite(found)]
        if not len(found):
            return Interval(value)
        tail = expanded_tail(self.num_rows)
        low, high = np.quantile(found, [tail, 1 - tail])
        return Interval(value, float(low), float(high))

    def share(self, hits: Sequence[bool]) -> Interval:
        """Of rows that are right or wrong. Where all are alike no draw differs, and the bound is the exact one (Clopper
        and Pearson): 0 of 30 does not mean never."""
        values = np.asarray(hits, dtype=float)
        if values.min() != values.max() or self.num_rows < MIN_ROWS:
            return self.interval(mean(values))
        other = ((1 - CONFIDENCE) / 2) ** (1 / len(values))
        return Interval(1.0, other, 1.0) if values[0] else Interval(0.0, 0.0, 1 - other)


def ratio(sums: Sequence[float], counts: Sequence[float]) -> Statistic:
    """A mean over tokens, whose rows hold different numbers of them."""
    sums, counts = np.asarray(sums, dtype=float), np.asarray(counts, dtype=float)

    def statistic(weights: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            return (weights @ sums) / (weights @ counts)

    return statistic


def mean(values: Sequence[float]) -> Statistic:
    """A mean over rows."""
    return ratio(values, np.ones(len(values)))


def quantile(rows: Sequence[np.ndarray], q: float) -> Statistic:
    """The smallest value that a share q of the tokens do not exceed; rows: the values of each row's tokens"""
    values = np.concatenate([np.asarray(row, dtype=float) for row in rows])
    order = np.argsort(values, kind="stable")
    values, owner = values[order], np.repeat(np.arange(len(rows)), [len(row) for row in rows])[order]

    def statistic(weights: np.ndarray) -> np.ndarray:
        found = []
        for start in range(0, len(weights), _AT_A_TIME):
            below = np.cumsum(weights[start : start + _AT_A_TIME][:, owner], axis=1)
            enough = below >= q * below[:, -1:]
            found.append(values[enough.argmax(axis=1)])
        return np.concatenate(found)

    return statistic


def expanded_tail(num_rows: int) -> float:
    """What is cut off on each side so that the interval of a mean is as long as Student's."""
    t = student_quantile((1 + CONFIDENCE) / 2, num_rows - 1)
    return NormalDist().cdf(-t * math.sqrt(num_rows / (num_rows - 1)))


def student_quantile(p: float, degrees: int) -> float:
    """Student's quantile by its expansion around the normal one (Abramowitz and Stegun, 26.7.5); 0.1 % off for 3
    degrees, less for more."""
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))
