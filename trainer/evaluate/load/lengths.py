"""How long prompts and answers are: a number, or a distribution that a setting spells out."""

import math
from collections.abc import Callable
from random import Random

from trainer.config.errors import UserError

Lengths = Callable[[Random], int]
"""Draws the next token count, at least 1."""
ACCEPTED = "128, uniform:64:256, lognormal:128:0.5 or lognormal:128:0.5:1024"


def read_lengths(key: str, text: str) -> Lengths:
    """`text` as a distribution of token counts.

    raises  UserError that names `key`
    """
    kind, *numbers = text.strip().split(":")
    try:
        if not numbers:
            return _fixed(int(kind))
        if kind == "uniform" and len(numbers) == 2:
            return _uniform(int(numbers[0]), int(numbers[1]))
        if kind == "lognormal" and len(numbers) in (2, 3):
            largest = int(numbers[2]) if len(numbers) == 3 else math.inf
            return _lognormal(float(numbers[0]), float(numbers[1]), largest=largest)
    except ValueError:
        pass
    raise UserError(f"{key}={text}; give {ACCEPTED}, all at least 1")


def _fixed(length: int) -> Lengths:
    _check(length >= 1)
    return lambda draw: length


def _uniform(low: int, high: int) -> Lengths:
    _check(1 <= low <= high)
    return lambda draw: draw.randint(low, high)


def _lognormal(median: float, sigma: float, *, largest: float) -> Lengths:
    _check(median >= 1 and 0 <= sigma <= 10 and largest >= 1)
    return lambda draw: int(min(largest, max(1, round(draw.lognormvariate(math.log(median), sigma)))))


def _check(accepted: bool) -> None:
    if not accepted:
        raise ValueError
