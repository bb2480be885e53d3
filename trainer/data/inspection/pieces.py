"""A document token by token, each with the text that it adds: what a person looks at.

One token is not always text: a character may take several, and some tokenizers write a word's space only when another
word stands before it. So tokens are decoded behind the piece before them, and those that are no whole character by
themselves are joined to one piece.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from trainer.data.loader import IGNORED

REPLACEMENT = "\ufffd"
_HIDES = 16
"""Fewer tokens than these are not worth a gap."""
MAX_JOINED = 4
"""A character of UTF-8 has at most four bytes."""


class Piece(NamedTuple):
    """One token, or the tokens of one character."""

    ids: tuple[int, ...]
    text: str
    is_target: bool
    is_special: bool


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Text of tokens, special ones as they are written."""
    return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that a template or tokenizer writes and no row says."""
    added = tokenizer.added_tokens_decoder
    return {*tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)}


class Cutter:
    """Cuts documents of one tokenizer into pieces."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._special = special_ids(tokenizer)
        self._decode = lru_cache(maxsize=1 << 17)(lambda ids: decode(tokenizer, ids))

    def pieces(self, input_ids: Sequence[int], labels: Sequence[int]) -> list[Piece]:
        """input_ids, labels: [T]; a label is its token's id where it is a target, else -100"""
        done: list[Piece] = []
        start, before = 0, ()
        while start < len(input_ids):
            end = self._end(input_ids, labels, start)
            ids = tuple(input_ids[start:end])
            is_special = ids[0] in self._special
            done.append(Piece(ids, self._text(before, ids), labels[start] != IGNORED, is_special))
            start, before = end, ids
        return done

    def _end(self, input_ids: Sequence[int], labels: Sequence[int], start: int) -> int:
        """Behind the tokens of one piece: more than one where only together they are whole characters."""
        is_target = labels[start] != IGNORED
        for end in range(start + 1, min(start + MAX_JOINED, len(input_ids)) + 1):
            if (labels[end - 1] != IGNORED) != is_target:
                break
            if REPLACEMENT not in self._decode(tuple(input_ids[start:end])):
                return end
        return start + 1

    def _text(self, before: tuple[int, ...], ids: tuple[int, ...]) -> str:
        """What `ids` add to the text that they stand behind."""
        context, whole = self._decode(before) if before else "", self._decode((*before, *ids))
        return whole[len(context) :] if whole.startswith(context) else self._decode(ids)


def shortened(pieces: Sequence[Piece], *, max_tokens: int) -> list[Piece | int]:
    """Pieces without the middles of long stretches; a number says how many tokens are not shown there."""
    groups = [list(group) for _, group in groupby(pieces, key=lambda piece: piece.is_target)]
    limit = max(20, max_tokens // max(1, len(groups)))
    done: list[Piece | int] = []
    for group in groups:
        if len(group) <= limit + _HIDES:
            done += group
            continue
        hidden = group[limit // 2 : len(group) - limit // 2]
        done += [*group[: limit // 2], sum(len(piece.ids) for piece in hidden), *group[len(group) - limit // 2 :]]
    return done
