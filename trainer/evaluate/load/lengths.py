"""How long prompts and answers are: a number, or a distribution that a setting spells out."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from trainer.config.errors import UserError

ACCEPTED = "128, uniform:64:256, lognormal:128:0.5 or lognormal:128:0.5:1024"


@dataclass(frozen=True)
class Lengths:
    """Token counts of at least 1: `sample(draw)` gives the next one, `largest` bounds them (None: unbounded)."""

    text: str
    sample: Callable[[Random], int]
    largest: int | None


def read_lengths(key: str, text: str) -> Lengths:
    """`text` as a distribution of token counts.

    raises  UserError that names `key`
    """
    kind, *numbers = text.strip().split(":")
    try:
        if not numbers:
            return _fixed(text, int(kind))
        if kind == "uniform" and len(numbers) == 2:
            return _uniform(text, int(numbers[0]), int(numbers[1]))
        if kind == "lognormal" and len(numbers) in (2, 3):
            largest = int(numbers[2]) if len(numbers) == 3 else None
            return _lognormal(text, float(numbers[0]), sigma=float(numbers[1]), largest=largest)
    except ValueError:
        pass
    raise UserError(f"{key}={text}; give {ACCEPTED}, all at least 1")


def _fixed(text: str, length: int) -> Lengths:
    _check(length >= 1)
    return Lengths(text, lambda draw: length, length)


def _uniform(text: str, low: int, high: int) -> Lengths:
    _check(1 <= low <= high)
    return Lengths(text, lambda draw: draw.randint(low, high), high)


def _lognormal(text: str, median: float, *, sigma: float, largest: int | None) -> Lengths:
    _check(median >= 1 and sigma >= 0 and (largest is None or largest >= 1))
    bound = math.inf if largest is None else largest
    return Lengths(
        text, lambda draw: int(min(bound, max(1, round(draw.lognormvariate(math.log(median), sigma))))), largest
    )


def _check(accepted: bool) -> None:
    if not accepted:
        raise ValueError
