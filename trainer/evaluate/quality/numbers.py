"""Numbers in answers to arithmetic: the one after ####, else the last one; equal as numbers, not as text.

`$1,234.50`, `-3`, `−3`, `.5`, `7.`, `12%`, `3/4` and `5 dollars` are numbers; `2-3` are two, and `- 3` at the beginning
of a line is a list. Units are not compared.
"""

import random
import re
from decimal import Decimal
from fractions import Fraction

_NUMBER = re.compile(
    r"(?<![\w.])"  # not inside a word or a number
    r"(?P<sign>[-\u2212+]?)(?:[$\u20ac\u00a3]\s?)?(?P<sign2>[-\u2212]?)"
    r"(?P<whole>\d{1,3}(?:[,\u00a0\u202f]\d{3})+(?!\d)|\d+)?"
    r"(?P<part>\.\d+)?"
    r"(?:/(?P<under>[1-9]\d*))?"
)
_MARK = "####"


def answer_number(text: str) -> Fraction | None:
    """The number that a text gives as its answer; None without one."""
    before, mark, after = text.rpartition(_MARK)
    if mark:
        found = numbers_in(after.strip().splitlines()[0] if after.strip() else "")
        if found:
            return found[0]
        text = before
    found = numbers_in(text)
    return found[-1] if found else None


def numbers_in(text: str) -> list[Fraction]:
    """All numbers, in order."""
    found = []
    for match in _NUMBER.finditer(text):
        whole, part, under = match["whole"], match["part"], match["under"]
        if whole is None and part is None:
            continue
        value = Fraction(re.sub(r"\D", "", whole or "0") + (part or ""))
        value = value / int(under) if under else value
        found.append(-value if _negative(text, match) else value)
    return found


def _negative(text: str, match: re.Match[str]) -> bool:
    """A minus is a sign where no number stands before it: `5-3` and `5 - 3` subtract, `x-3` is a name."""
    if match["sign2"]:
        return True
    if match["sign"] in ("", "+"):
        return False
    before = text[: match.start()]
    adjacent, last = before[-1:], before.rstrip()[-1:]
    return not (adjacent.isalnum() or last.isdigit() or (last != "" and last in ")%"))


def wrong_numbers(right: Fraction, draw: random.Random, *, count: int = 3) -> list[Fraction]:
    """Different numbers that a slip would give: off by one, a digit changed, ten times as much, half, double."""
    candidates = [right + 1, right - 1, right + 10, right - 10, right * 10, right * 2, right / 2, right + 2, right - 2]
    whole = right.denominator == 1
    candidates = [n for n in candidates if n != right and (n.denominator == 1 or not whole) and (n >= 0 or right < 0)]
    draw.shuffle(candidates)
    return list(dict.fromkeys(candidates))[:count]


def as_text(number: Fraction) -> str:
    """As GSM8K writes it: 18, -3, 2.5; to 28 digits where there is no end."""
    return str(number.numerator) if number.denominator == 1 else f"{Decimal(number.numerator) / number.denominator:f}"
