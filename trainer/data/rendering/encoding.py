"""A text's token ids, and which of them belong to a part of the text: exact, without tokenizing each beginning anew.

A tokenizer first cuts a text at its added tokens (`<|im_end|>`), and what stands between two of them does not depend
on anything outside. So the ids of a beginning are those of the whole up to the last such token in it, and then those
of the little that follows, tokenized together with the token. Where that cannot be (a tokenizer without offsets, or
one that is found to break the rule), the beginning is tokenized.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache

from transformers import PreTrainedTokenizerBase

from trainer.chat_messages import with_one_bos
from trainer.data.rows import fail

_FAULTS = (TypeError, ValueError)  # a lone surrogate is no text


class Encoder:
    """One tokenizer. It adds nothing to a text: a chat template has written BOS if it wants one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.cuts = {
            index
            for index, token in tokenizer.added_tokens_decoder.items()
            if tokenizer.is_fast and not (token.normalized or token.single_word)
        }
        """Ids of the tokens that a text is cut at before anything else; empty: nothing is known, tokenize instead."""
        self.short_ids = lru_cache(maxsize=4096)(self._plain_ids)

    def __getstate__(self) -> dict[str, object]:
        return {"_tokenizer": self._tokenizer, "cuts": self.cuts}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.short_ids = lru_cache(maxsize=4096)(self._plain_ids)

    def encode(self, where: str, text: str) -> "Encoded":
        """raises  BadRow for a text that is no Unicode"""
        try:
            done = self._tokenizer(
                text, add_special_tokens=False, verbose=False, return_offsets_mapping=self._tokenizer.is_fast
            )
        except _FAULTS as error:
            fail(where, f"the tokenizer refuses the text ({error}); write valid Unicode", kind="no valid text")
        ids = with_one_bos(done["input_ids"], self._tokenizer.bos_token_id)
        places = done.get("offset_mapping")
        return Encoded(self, text, ids, None if places is None else places[len(places) - len(ids) :])

    def ids(self, text: str) -> list[int]:
        return with_one_bos(self._plain_ids(text), self._tokenizer.bos_token_id)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def piece(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and places of a text that something stands before: at a text's very beginning some tokenizers write a
        space."""
        if not text:
            return [], []
        before = self._tokenizer.convert_ids_to_tokens(self._edge) if self._edge is not None else ""
        done = self.encode("", before + text)
        skip = 1 if before else 0
        places = [(start - len(before), end - len(before)) for start, end in done.places[skip:]]
        return done.ids[skip:], places

    @cached_property
    def _edge(self) -> int | None:
        """A token that text may follow without being changed by it."""
        added = self._tokenizer.added_tokens_decoder
        plain = (token for token in self.cuts if not (added[token].rstrip or added[token].lstrip))
        return min(plain, default=None)

    def distrust_cuts(self) -> None:
        """From now on, tokenize beginnings whole."""
        self.cuts = set()

    def _plain_ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


@dataclass
class Encoded:
    encoder: Encoder
    text: str
    ids: list[int]
    """[T]"""
    places: list[tuple[int, int]] | None
    """[T]: the characters that a token stands for; None where the tokenizer cannot tell."""

    @cached_property
    def _starts(self) -> list[int]:
        return [start for start, _ in self.places]

    def len_of(self, beginning: str) -> int | None:
        """Tokens of `text`'s beginning, where those of the text begin with them; else None."""
        if not self.encoder.cuts or self.places is None:
            ids = self.encoder.ids(beginning)
            return len(ids) if self.ids[: len(ids)] == ids else None
        cut, begin = self._last_cut(len(beginning))
        ids = self.encoder.short_ids(beginning[begin:]) if cut else self.encoder.ids(beginning)
        return cut + len(ids) if self.ids[cut : cut + len(ids)] == ids else None

    def _last_cut(self, end: int) -> tuple[int, int]:
        """The last token that the text is cut at in its first `end` characters: its index, its first character."""
        for index in range(bisect_left(self._starts, end) - 1, 0, -1):
            if self.ids[index] in self.encoder.cuts and self.places[index][1] <= end:
                return index, self._starts[index]
        return 0, 0

    def first_behind(self, beginning: str) -> int:
        """The first token that stands behind a beginning of the text, and is no part of it."""
        known = self.len_of(beginning)
        if known is not None:
            return known
        # The answer's first characters merge with the template's last ones ("\n" + "\nYes" -> "\n\n", "Yes"). Such a
        # token is half template and is never generated after the prompt, so targets begin behind it.
        prompt = self.encoder.ids(beginning)
        start = shared_len(prompt, self.ids)
        num_chars = len(self.encoder.decode(prompt[start:]))
        ends = range(start, len(self.ids))
        behind = (end for end in ends if len(self.encoder.decode(self.ids[start:end])) >= num_chars)
        return next(behind, len(self.ids))

    def parted(self, beginning: str) -> "Encoded | None":
        """The same text with its beginning tokenized alone, where one token reaches over its end; None where that
        cannot be told to say the same."""
        if self.places is None:
            return None
        prompt, start = self.encoder.encode("", beginning), len(beginning)
        first = bisect_left(self._starts, start)
        for behind in range(first, min(first + 2, len(self.ids) + 1)):
            ends = {self.places[behind - 1][1], *self._starts[behind : behind + 1]}
            for end in sorted(end for end in ends if end >= start):
                ids, places = self.encoder.piece(self.text[start:end])
                ids = [*prompt.ids, *ids, *self.ids[behind:]]
                if self.encoder.decode(ids) == self.encoder.decode(self.ids):
                    moved = [(one + start, other + start) for one, other in places]
                    return Encoded(self.encoder, self.text, ids, [*prompt.places, *moved, *self.places[behind:]])
        return None

    def end_of(self, num_chars: int) -> int:
        """How many tokens have a character among the first `num_chars`."""
        if self.places is None:
            return shared_len(self.encoder.ids(self.text[:num_chars]), self.ids)
        return bisect_left(self._starts, num_chars)

    def touching(self, start: int, end: int) -> range:
        """The tokens that have a character in [start, end)."""
        if end <= start:
            return range(0)
        if self.places is None:
            return range(shared_len(self.encoder.ids(self.text[:start]), self.ids), self.end_of(end))
        first = bisect_right(self._starts, start)
        while first > 0 and self.places[first - 1][1] > start:
            first -= 1
        return range(first, bisect_left(self._starts, end))


def shared_len(one: list[int] | str, other: list[int] | str) -> int:
    """How many tokens, or characters, two share from their beginnings on."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low


def shared_tail(one: str, other: str) -> str:
    """What two texts end with."""
    num_chars = shared_len(one[::-1], other[::-1])
    return one[len(one) - num_chars :]
