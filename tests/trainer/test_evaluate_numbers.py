"""Numbers in answers: what counts as one, and which one is the answer."""

import random
from fractions import Fraction

import pytest

from trainer.evaluate.quality.numbers import answer_number, as_text, numbers_in, wrong_numbers

CASES = {
    "#### 18": "18",
    "She has 3 left.\n#### 1,234": "1234",
    "#### $1,234.50 in all": "1234.5",
    "#### -7": "-7",
    "#### 12 apples\nAnd then 99 more": "12",  # what comes behind the line is no answer
    "First #### 3, corrected #### 4": "4",
    "The answer is 5 dollars.": "5",
    "It costs $3.75": "3.75",
    "that leaves .5": "0.5",
    "7.": "7",
    "about 12%": "12",
    "-$40": "-40",
    "$-40": "-40",
    "\u22123 degrees": "-3",
    "5-3": "3",
    "5 - 3 = 2": "2",
    "x=-4": "-4",
    "- 3 apples\n- 4 pears": "4",
    "3/4": "0.75",
    "1,2,3": "3",
    "12,345,678": "12345678",
    "1\u202f234": "1234",
    "#### no number, but 6 before": "6",
    "no number": None,
    "a2b, v1.2.3": None,
    "": None,
    "####": None,
}


@pytest.mark.parametrize("text", CASES)
def test_answers(text):
    number = answer_number(text)
    assert (None if number is None else as_text(number)) == CASES[text]


def test_numbers_are_exact():
    assert answer_number("#### 0.1") == Fraction(1, 10)
    assert as_text(answer_number("#### 12345678901234567890.5")) == "12345678901234567890.5"
    assert answer_number("1,234.50") == answer_number("1234.5")


def test_all_numbers_in_order():
    assert numbers_in("from 2 to -3, then 1,000 or 1/2") == [2, -3, 1000, Fraction(1, 2)]


@pytest.mark.parametrize("right", [Fraction(0), Fraction(18), Fraction(-3), Fraction(5, 2)])
def test_wrong_numbers_are_wrong_and_differ(right):
    found = wrong_numbers(right, random.Random(0))
    assert len(found) == len(set(found)) == 3 and right not in found
    assert right.denominator != 1 or all(number.denominator == 1 for number in found)
    assert right < 0 or min(found) >= 0  # a choice is not given away by its sign
