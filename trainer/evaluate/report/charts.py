"""Line charts and intervals as inline SVG; colours are classes, so that they follow light and dark.

What the pointer is on is said by <title> elements of columns that cover the chart. Long series lose points but never
their extremes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.evaluate.report.scales import Scale, number
from trainer.page.text import escaped

WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 36
MAX_BUCKETS = 240
"""Of a line: each has its lowest and highest value, so about a bucket a pixel pair."""
MAX_STRIPS = 120
SMOOTH_FROM = 60
"""Points from which a noisy line is also drawn smoothed."""
NUM_COLOURS = 6


@dataclass(frozen=True)
class Series:
    """A line or marks; a value that is not finite is a gap."""

    name: str
    points: Sequence[tuple[float, float]]
    """In the order of the first."""
    colour: int = 0
    marks: bool = False
    """A mark a point, joined by a thin line; else a line alone."""
    dashed: bool = False
    noisy: bool = False
    """Whether a long one is also drawn smoothed."""

    def finite(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in self.points if math.isfinite(x) and math.isfinite(y)]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_name: str = "step",
    log: bool = False,
    from_zero: bool = False,
    names: Sequence[str] = (),
) -> str:
    """A figure with its title, legend, axes and lines; nothing where no series has a finite value.

    log        logarithmic upwards, where all values are above 0
    from_zero  the axis upwards begins at 0
    names      what the whole numbers 0, 1, ... across stand for, said under the pointer
    """
    shown = [each for each in series if each.finite()]
    if not shown:
        return ""
    points = [point for each in shown for point in each.finite()]
    across, xs = _across([x for x, _ in points]), sorted({x for x, _ in points})
    up = Scale.of([y for _, y in points], log=log, from_zero=from_zero)
    drawn = "".join(part for each in shown for part in _drawn(each, across, up))
    body = f"{''.join(_axes(across, up, x_name))}{drawn}{''.join(_strips(shown, xs, across, x_name, names))}"
    heading = f"<figcaption>{escaped(title)}{_legend(shown)}</figcaption>"
    label = escaped(f"{title}: {', '.join(each.name for each in shown)}")
    return (
        f'<figure class="panel chart">{heading}<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"{body}</svg></figure>"
    )


def _legend(series: Sequence[Series]) -> str:
    if len(series) == 1:
        return ""
    keys = (
        f'<span class="key c{each.colour % NUM_COLOURS}{_dash(each)}">{escaped(each.name)}</span>' for each in series
    )
    return f'<span class="keys">{"".join(keys)}</span>'


def _dash(series: Series) -> str:
    return " dashed" if series.dashed else ""


def _across(xs: Sequence[float]) -> Scale:
    low, high = min(xs), max(xs)
    return Scale(low, high) if high > low else Scale(low - 0.5, low + 0.5)


def _x(scale: Scale, value: float) -> float:
    return _LEFT + scale.share(value) * (WIDTH - _LEFT - _RIGHT)


def _y(scale: Scale, value: float) -> float:
    return HEIGHT - _BOTTOM - scale.share(value) * (HEIGHT - _TOP - _BOTTOM)


def _axes(across: Scale, up: Scale, x_name: str) -> Iterator[str]:
    base, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    for tick in up.ticks(5):
        y = _y(up, tick)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>'
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{base}" y2="{base}"/>'
    for tick in across.ticks(7):
        x = _x(across, tick)
        yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}"/>'
        yield f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{number(tick)}</text>'
    yield f'<text x="{right}" y="{HEIGHT - 5}" text-anchor="end">{escaped(x_name)}</text>'


def _drawn(series: Series, across: Scale, up: Scale) -> Iterator[str]:
    """The line; of a long noisy one a pale line and its mean over it; marks."""
    colour, points = f"c{series.colour % NUM_COLOURS}", series.finite()
    smooth = series.noisy and len(points) >= SMOOTH_FROM
    kind = "pale" if smooth else "thin" if series.marks else "line"
    yield _path(_runs(series.points), across, up, f"{kind} {colour}{_dash(series)}")
    if smooth:
        yield _path([smoothed(points)], across, up, f"line {colour}{_dash(series)}")
    if series.marks or len(points) == 1:
        for x, y in points:
            yield f'<circle class="mark {colour}" cx="{_x(across, x):.1f}" cy="{_y(up, y):.1f}" r="3.2"/>'


def _path(runs: Sequence[Sequence[tuple[float, float]]], across: Scale, up: Scale, kind: str) -> str:
    parts = []
    for run in runs:
        places = [f"{_x(across, x):.1f} {_y(up, y):.1f}" for x, y in thinned(run)]
        parts.append(f"M{'L'.join(places)}")
    return f'<path class="{kind}" d="{"".join(parts)}"/>'


def _runs(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """The points between gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if math.isfinite(x) and math.isfinite(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of a long line the first, the lowest, the highest and the last point of each bucket."""
    if len(points) <= 4 * MAX_BUCKETS:
        return list(points)
    kept: list[tuple[float, float]] = []
    for place in range(MAX_BUCKETS):
        part = points[place * len(points) // MAX_BUCKETS : (place + 1) * len(points) // MAX_BUCKETS]
        ends = {0, len(part) - 1}
        ends |= {choose(range(len(part)), key=lambda i: part[i][1]) for choose in (min, max)}
        kept += [part[i] for i in sorted(ends)]
    return kept


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means over a window of a twentieth of the points around each."""
    half, sums = max(1, len(points) // 40), [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    done = []
    for place, (x, _) in enumerate(points):
        reach = min(half, place, len(points) - 1 - place)  # as far on both sides, so that the ends are not bent
        first, end = place - reach, place + reach + 1
        done.append((x, (sums[end] - sums[first]) / (end - first)))
    return done


def _strips(
    series: Sequence[Series], xs: Sequence[float], across: Scale, x_name: str, names: Sequence[str]
) -> Iterator[str]:
    """Unseen columns over the lines that say what is at an x; those of marks are all there."""
    chosen = xs
    if len(xs) > MAX_STRIPS:
        marked = {x for each in series if each.marks for x, _ in each.finite()[:MAX_STRIPS]}
        chosen = sorted(marked | {xs[i * (len(xs) - 1) // (MAX_STRIPS - 1)] for i in range(MAX_STRIPS)})
    values = [(each.name, dict(each.finite())) for each in series]
    centres = [_x(across, x) for x in chosen]
    middles = [(a + b) / 2 for a, b in zip(centres, centres[1:], strict=False)]
    for x, left, right in zip(chosen, [_LEFT, *middles], [*middles, WIDTH - _RIGHT], strict=True):
        said = [f"{name}: {number(at[x])}" for name, at in values if x in at]
        head = names[int(x)] if names else f"{x_name} {number(x)}"
        text = escaped("\n".join([head, *said]))
        yield (
            f'<rect class="strip" x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" '
            f'height="{HEIGHT - _TOP - _BOTTOM}"><title>{text}</title></rect>'
        )


def interval(low: float, value: float, high: float, *, reference: float) -> str:
    """A value with its interval, beside the value that says that nothing differs."""
    width, y, scale = 180, 9, Scale.of([reference, low, value, high])
    at = 6 + scale.share(reference) * (width - 12)
    a, x, b = (6 + scale.share(each) * (width - 12) for each in (low, value, high))
    title = escaped(f"{number(value)}, {number(low)} to {number(high)}")
    return (
        f'<svg class="interval" viewBox="0 0 {width} 18" role="img" aria-label="{title}"><title>{title}</title>'
        f'<line class="grid" x1="6" x2="{width - 6}" y1="{y}" y2="{y}"/>'
        f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="1" y2="17"/>'
        f'<line class="whisker" x1="{a:.1f}" x2="{b:.1f}" y1="{y}" y2="{y}"/>'
        f'<circle class="mark c0" cx="{x:.1f}" cy="{y}" r="3.5"/></svg>'
    )
