"""Where two answers part, and how it is marked."""

import pytest

from trainer.evaluate.quality.bootstrap import Resampler
from trainer.evaluate.quality.divergence import MARK, Pair, compare_answers, first_divergence, worst


class Letters:
    """A tokenizer: a letter a token; 9 and 8 together are one."""

    def decode(self, ids, skip_special_tokens):
        return "".join("\ufffd" if i == 9 else "" if i == 8 else chr(96 + i) for i in ids).replace("\ufffd\ufffd", "é")


def pair(original, candidate):
    return Pair.of("?", original, candidate, Letters())


@pytest.mark.parametrize(
    ("a", "b", "place"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [1], 0), ([], [], None)]
)
def test_first_divergence(a, b, place):
    assert first_divergence(a, b) == place == first_divergence(b, a)


def test_the_mark_stands_where_answers_part():
    found = pair([1, 2, 3], [1, 2, 4, 5])
    assert (found.divergence, found.common, found.same, found.original, found.candidate) == (2, 0.5, "ab", "c", "de")
    assert found.marked() == {"original": f"ab{MARK}c", "candidate": f"ab{MARK}de"}
    assert found.to_dict()["marked"] == found.marked()


def test_equal_answers_have_no_mark():
    found = pair([1, 2], [1, 2])
    assert found.divergence is None and found.marked() == {"original": "ab", "candidate": "ab"} and found.common == 1


def test_half_a_character_is_not_shown_as_common():
    """é is two tokens of which the first is common: both texts are whole behind the mark."""
    found = pair([1, 9, 9], [1, 9, 2])
    assert found.same == "a" and (found.original, found.candidate) == ("é", "\ufffdb")


def test_figures_and_the_worst():
    pairs = [pair([1, 2, 3, 4], other) for other in ([1, 2, 3, 4], [1, 2, 5, 5], [5, 2, 3, 4], [1, 2, 3, 4, 5])]
    found = compare_answers(pairs, Resampler(4))
    assert found["exact"]["value"] == 0.25 and found["first_divergence"]["value"] == pytest.approx((2 + 0 + 4) / 3)
    assert found["common"]["value"] == pytest.approx((1 + 0.5 + 0 + 0.8) / 4)
    assert found["first_divergence_shares"]["50%"] == 2
    assert [each.divergence for each in worst(pairs)] == [0, 2, 4] and len(worst(pairs, 1)) == 1


def test_answers_that_never_part():
    found = compare_answers([pair([1], [1])] * 5, Resampler(5))
    assert found["exact"]["value"] == 1 and found["exact"]["low"] < 0.6  # five are few
    assert found["first_divergence"]["value"] is None and found["first_divergence_shares"] == {}
