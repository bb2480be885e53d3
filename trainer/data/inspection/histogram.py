"""A histogram as an inline SVG: how many documents have how many tokens, and where data.max_seq_len cuts."""

from collections.abc import Iterator, Sequence

WIDTH, HEIGHT = 720, 180
_TOP, _BOTTOM, _SIDE = 18, 24, 8
_TICKS = 8


def histogram(bars: Sequence[tuple[int, int, int]], limit: int) -> str:
    """bars: [first, end) tokens and how many are so long; limit: tokens, drawn as a line"""
    end, most = max(bars[-1][1], limit), max(count for _, _, count in bars)
    inner = HEIGHT - _TOP - _BOTTOM

    def across(tokens: float) -> float:
        return _SIDE + tokens / end * (WIDTH - 2 * _SIDE)

    def rectangle(first: int, behind: int, count: int) -> str:
        height = max(1.0, count / most * inner)
        x, width = across(first), max(1.0, across(behind) - across(first) - 1)
        what = f"{count:,} of {first:,} to {behind - 1:,} tokens" if behind - first > 1 else f"{count:,} of {first:,}"
        return (
            f'<rect class="bar" x="{x:.1f}" y="{HEIGHT - _BOTTOM - height:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}" rx="1.5"><title>{what}</title></rect>'
        )

    step = next(step for step in _steps() if end / step <= _TICKS)
    ticks = range(0, end + 1, step)
    labels = "".join(
        f'<text x="{across(tick):.1f}" y="{HEIGHT - 7}" text-anchor="{_anchor(tick, end)}">{tick:,}</text>'
        for tick in ticks
    )
    at, base = across(limit), HEIGHT - _BOTTOM
    side = "end" if at > WIDTH / 2 else "start"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="histogram of lengths">'
        f'<line class="axis" x1="{_SIDE}" x2="{WIDTH - _SIDE}" y1="{base}" y2="{base}"/>'
        f"{''.join(rectangle(*bar) for bar in bars if bar[2])}{labels}"
        f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{base}"/>'
        f'<text class="limit-text" x="{at + (-5 if side == "end" else 5):.1f}" y="12" text-anchor="{side}">'
        f"data.max_seq_len={limit:,}</text></svg>"
    )


def _steps() -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, ..."""
    power = 1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


def _anchor(tick: int, end: int) -> str:
    return "start" if tick == 0 else "end" if tick == end else "middle"
