"""From tokens to figures with intervals: perplexity, divergence, agreement, and what was recovered."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.evaluate.quality.bootstrap import Interval, Resampler, quantile, ratio
from trainer.evaluate.quality.material import Windows
from trainer.evaluate.token_rows import KL, LOSS, LOSS_ORIGINAL, SAME, TokenRows

Figures = dict[str, dict[str, float | None]]
"""Name -> value, low and high."""


def divergence_figures(found: TokenRows, resampler: Resampler) -> Figures:
    """How far two models are from each other, token by token.

    kl, kl_99, kl_max  KL(original || other) in nats a token: its mean, what 1 % exceed, and its largest value, which
                       has no bootstrap interval, since no sample exceeds it
    same_token         share of positions with the same likeliest token
    right_to_wrong, wrong_to_right, flips   shares of positions whose likeliest token was, or became, the text's
    """
    counts, rows = found.counts, [row[KL].numpy() for row in found.rows]
    broken, mended = found.flips(to_right=False), found.flips(to_right=True)
    flips = [a + b for a, b in zip(broken, mended, strict=True)]
    figures = {
        "kl": resampler.interval(ratio(found.sums(KL), counts)),
        "kl_99": resampler.interval(quantile(rows, 0.99)),
        "kl_max": Interval(found.all(KL).max().item()),
        "same_token": resampler.interval(ratio(found.sums(SAME), counts)),
        "right_to_wrong": resampler.interval(ratio(broken, counts)),
        "wrong_to_right": resampler.interval(ratio(mended, counts)),
        "flips": resampler.interval(ratio(flips, counts)),
    }
    return {name: interval.to_dict() for name, interval in figures.items()}


def loss_figures(found: TokenRows, windows: Windows, resampler: Resampler, *, what: int = LOSS) -> Figures:
    """Perplexity a token and a word, and bits a byte; the last two compare models of different tokenizers.

    what  LOSS or LOSS_ORIGINAL
    """
    loss = resampler.interval(ratio(found.sums(what), found.counts))
    tokens = sum(found.counts)
    return {
        "loss": loss.to_dict(),
        "perplexity": _mapped(loss, lambda nats: math.exp(nats)).to_dict(),
        "perplexity_word": _mapped(loss, lambda nats: _exp(nats * tokens / windows.words)).to_dict(),
        "bits_per_byte": _mapped(loss, lambda nats: nats * tokens / windows.bytes / math.log(2)).to_dict(),
    }


def cost_figures(found: TokenRows, resampler: Resampler) -> Figures:
    """What it costs in loss, on the same draws of rows for both models: narrower than two intervals side by side."""
    more = np.subtract(found.sums(LOSS), found.sums(LOSS_ORIGINAL))
    loss = resampler.interval(ratio(more, found.counts))
    return {
        "loss_added": loss.to_dict(),
        "perplexity_ratio": _mapped(loss, lambda nats: math.exp(nats)).to_dict(),
    }


def recovered_share(found: TokenRows, rounded: TokenRows, resampler: Resampler) -> Interval | None:
    """(rounded - candidate) / (rounded - original) in loss; None if rounding to nearest adds no loss.

    Above 1 the candidate is better than the original, as after training on such text.
    """
    if sum(rounded.sums(LOSS)) <= sum(rounded.sums(LOSS_ORIGINAL)):
        return None
    gained = np.subtract(rounded.sums(LOSS), found.sums(LOSS))
    added = np.subtract(rounded.sums(LOSS), rounded.sums(LOSS_ORIGINAL))
    return resampler.interval(ratio(gained, added))


def _mapped(interval: Interval, function: Any) -> Interval:
    """Of a growing function."""
    ends = [None if end is None else function(end) for end in (interval.low, interval.high)]
    return Interval(function(interval.value), *ends)


def _exp(value: float) -> float:
    """A word of a random model has a perplexity that no float holds."""
    return math.exp(value) if value < 700 else math.inf


def bounds(figure: dict[str, float | None], form: str, *, scale: float = 1.0) -> str:
    """A figure for people: `0.0775 [0.0712, 0.0840]`."""
    if figure["value"] is None:
        return "-"
    value, *ends = (None if end is None else f"{scale * end:{form}}" for end in _ends(figure))
    return value if None in ends else f"{value} [{ends[0]}, {ends[1]}]"


def _ends(figure: dict[str, float | None]) -> Sequence[float | None]:
    return figure["value"], figure["low"], figure["high"]
