"""Prompt lookup: what followed the last tokens the last time."""

import random

import pytest

from trainer.serve.ngram import MAX_NGRAM, MIN_NGRAM, propose


def propose_reference(token_ids: list[int], num_tokens: int) -> list[int]:
    """The longest end that occurred before, its last occurrence, by trying all."""
    for length in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
        for begin in range(len(token_ids) - length - 1, -1, -1):
            if length < len(token_ids) and token_ids[begin : begin + length] == token_ids[-length:]:
                grown = list(token_ids)
                for _ in range(num_tokens):
                    grown.append(grown[begin + length + len(grown) - len(token_ids)])
                return grown[len(token_ids) :]
    return []


@pytest.mark.parametrize(
    ("token_ids", "num_tokens", "want"),
    [
        ([], 4, []),
        ([1], 4, []),
        ([1, 1], 4, []),  # one token alone is no pattern
        ([1, 1, 1], 4, [1, 1, 1, 1]),  # patterns may overlap, and the copy runs on into itself
        ([1, 2, 3, 1, 2], 4, [3, 1, 2, 3]),
        ([1, 2, 3, 1, 2], 1, [3]),
        ([1, 2, 3, 1, 2], 0, []),
        ([1, 2, 3, 1, 2], -1, []),
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, [4]),  # the last occurrence
        ([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], 1, [3]),  # the longest pattern before the last occurrence
        ([1, 2, 3, 4], 4, []),
    ],
)
def test_propose(token_ids: list[int], num_tokens: int, want: list[int]) -> None:
    assert propose(token_ids, num_tokens) == want


def test_ids_that_match_only_across_their_bytes() -> None:
    """The bytes of 256, 256 also occur one byte into 1, 1, 1, where no token begins."""
    assert propose([1, 1, 1, 7, 256, 256], 2) == []
    assert propose([65536, 65536, 65536, 7, 256, 256, 9, 256, 256], 1) == [9]


def test_like_trying_all() -> None:
    generator = random.Random(0)
    for _ in range(2000):
        token_ids = generator.choices([1, 2, 256, 65536], k=generator.randint(0, 24))
        num_tokens = generator.randint(0, 5)
        assert propose(token_ids, num_tokens) == propose_reference(token_ids, num_tokens)
