"""Whether a point was in a steady state, and when.

The steady window opens when the first answers are complete (until then requests in flight only grow) and closes with
the last arrival. Within it the requests in flight are averaged over ten slices. Their slope is requests that pile up a
second; over the arrival rate it is the share of arrivals that the server does not keep up with. A server above its
capacity has a share well above 0 for as long as it is asked, and its latencies then say how long the run was, nothing
else. Slices, not moments, are tested, for neighbouring moments are nearly the same number.
"""

import math
import statistics
from dataclasses import dataclass

from trainer.evaluate.load.answer import Outcome

SLICES = 10
T_LIMIT = 2.896
"""Student's t of a slope over ten slices (8 degrees of freedom), one-sided at 1 %."""
SHARE_LIMIT = 0.05
"""A queue that grows by less of its arrivals is within what chance does in some hundred requests."""
MIN_ARRIVALS = 20
MIN_WINDOW = 0.25
"""Smallest steady part of a run that anything is said about."""


@dataclass(frozen=True)
class Steady:
    """The steady window (seconds, of the outcomes' clock) and what the requests in flight did in it."""

    start: float
    end: float
    in_flight: float
    growth_per_s: float
    growth_share: float
    saturated: bool


def steady_state(outcomes: list[Outcome]) -> Steady | None:
    """The steady part of an open loop's outcomes; None if the run was too short to have one."""
    window = _window(outcomes)
    arrivals = sum(window[0] <= outcome.due <= window[1] for outcome in outcomes) if window else 0
    if arrivals < MIN_ARRIVALS:
        return None
    start, end = window
    means = _slice_means(outcomes, start, end)
    slope, t = _trend(means)
    growth = slope * SLICES / (end - start)
    share = growth * (end - start) / arrivals
    return Steady(start, end, statistics.mean(means), growth, share, t > T_LIMIT and share > SHARE_LIMIT)


def peak_in_flight(outcomes: list[Outcome]) -> int:
    """The most requests that were due and not answered at a time."""
    steps = [(outcome.due, 1) for outcome in outcomes] + [(outcome.ended, -1) for outcome in outcomes]
    now = peak = 0
    for _, step in sorted(steps):
        now += step
        peak = max(peak, now)
    return peak


def _window(outcomes: list[Outcome]) -> tuple[float, float] | None:
    measured = sorted((outcome for outcome in outcomes if not outcome.warmup), key=lambda outcome: outcome.due)
    if not measured:
        return None
    begin, end = measured[0].due, measured[-1].due
    first = min(outcome.due for outcome in outcomes)
    early = [outcome.ended - outcome.due for outcome in measured[: max(1, len(measured) // 10)]]
    start = max(begin, first + statistics.median(early))
    return (start, end) if end > begin and end - start >= MIN_WINDOW * (end - begin) else None


def _slice_means(outcomes: list[Outcome], start: float, end: float) -> list[float]:
    """Mean requests in flight of each slice, exactly: overlaps of [due, ended) with it."""
    length = (end - start) / SLICES
    edges = [(start + i * length, start + (i + 1) * length) for i in range(SLICES)]
    return [sum(max(0.0, min(o.ended, high) - max(o.due, low)) for o in outcomes) / length for low, high in edges]


def _trend(values: list[float]) -> tuple[float, float]:
    """Slope a step of the least-squares line, and its t; inf if the line is exact."""
    slope, intercept = statistics.linear_regression(range(len(values)), values)
    squares = sum((value - intercept - slope * i) ** 2 for i, value in enumerate(values))
    spread = sum((i - (len(values) - 1) / 2) ** 2 for i in range(len(values)))
    error = math.sqrt(squares / (len(values) - 2) / spread)
    return slope, slope / error if error > 0 else math.copysign(math.inf, slope) if slope else 0.0
