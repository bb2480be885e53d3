"""When requests arrive: n moments that depend on a seed alone, never on the server.

Gaps are drawn and scaled so that the n-th request arrives at n / rate seconds, whatever was drawn. Two seeds then ask
for the same number of requests in the same time and differ only in how these bunch; without it, a hundred Poisson
arrivals take a tenth longer or shorter by chance, and so does every figure. Gamma gaps have `burstiness` for their
shape, so their coefficient of variation is 1 / sqrt(burstiness).
"""

import math
from random import Random

from trainer.config.errors import require
from trainer.config.load import Arrivals


def arrival_times(kind: Arrivals, num: int, *, rate: float, burstiness: float, draw: Random) -> list[float]:
    """Seconds from the start at which `num` requests are due, ascending; the last one at num / rate.

    rate     requests a second; inf for all at 0
    returns  [num] float
    """
    if math.isinf(rate):
        return [0.0] * num
    gaps = [_gap(kind, burstiness, draw) for _ in range(num)]
    scale, due, times = num / rate / sum(gaps), 0.0, []
    for gap in gaps:
        due += gap * scale
        times.append(due)
    return times


def replayed_times(timestamps: list[float], *, unit_s: float, rate: float | None) -> list[float]:
    """A trace's arrivals, from 0 on: with its own gaps, or stretched to `rate` requests a second on average.

    timestamps  ascending, of any origin, `unit_s` seconds each
    raises      UserError if they do not ascend, or all coincide and are to be stretched
    """
    steps = zip(timestamps, timestamps[1:], strict=False)
    late = next((i for i, (before, after) in enumerate(steps, 2) if after < before), None)
    require(late is None, f"trace: timestamp {late} is earlier than the one before; sort the rows")
    times = [(timestamp - timestamps[0]) * unit_s for timestamp in timestamps]
    if rate is None:
        return times
    if math.isinf(rate):
        return [0.0] * len(times)
    require(times[-1] > 0, f"trace: all timestamps are {timestamps[0]}; use rate=inf or rate=trace")
    return [due * (len(times) / rate) / times[-1] for due in times]


def _gap(kind: Arrivals, burstiness: float, draw: Random) -> float:
    match kind:
        case Arrivals.uniform:
            return 1.0
        case Arrivals.poisson:
            return draw.expovariate(1.0)
        case Arrivals.gamma:
            return draw.gammavariate(burstiness, 1 / burstiness)
