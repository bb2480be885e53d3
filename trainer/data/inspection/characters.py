"""Which writing systems the tokenizer cuts into pieces of characters.

A token that holds a part of a character decodes to U+FFFD. Text in a script that is written that way costs several
tokens a letter, and an answer that is cut in the middle of one is damaged. Counted over all tokens: each token that is
whole characters once for the vocabulary, each run of the others once for each run that differs.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trainer.data.inspection.chunks import Chunk, chunks, document_lengths, sides
from trainer.data.inspection.pieces import decode, special_ids

REPLACEMENT = "\ufffd"
MAX_TOKENS = 1 << 24
"""The worst case, 12.5 M tokens of which half are parts of characters in no order, takes 20 s on a busy core."""
_EMOJI = ((0x1F000, 0x1FAFF), (0x2600, 0x27BF), (0x2B00, 0x2BFF))
_JOINS_EMOJI = {0xFE0F, 0x200D, 0x20E3}


@dataclass
class Script:
    """Characters of one writing system."""

    characters: int = 0
    broken: int = 0
    """Characters of which no token is the whole."""
    examples: Counter[str] = field(default_factory=Counter)
    """The broken ones, and how often they stand in the rows."""

    @property
    def share(self) -> float:
        """Of its characters, broken; 0..1."""
        return self.broken / self.characters if self.characters else 0.0


@dataclass
class Characters:
    scripts: dict[str, Script] = field(default_factory=dict)
    """Unicode's name of the script -> its characters; most of them first."""
    damaged: int = 0
    """U+FFFD in the rows: text that was damaged before, or that was cut within a character."""
    part: float = 1.0
    """Of the tokens that were looked at, spread over the rows."""

    def broken(self) -> dict[str, Script]:
        """Scripts of which the tokenizer breaks characters, the worst first."""
        found = [(name, script) for name, script in self.scripts.items() if script.broken]
        return dict(sorted(found, key=lambda item: (-item[1].share, item[0])))


@lru_cache(maxsize=1 << 16)
def script_of(char: str) -> str:
    """CYRILLIC, HANGUL, CJK, EMOJI, ...: the first word of the character's Unicode name; COMMON for what all share."""
    code = ord(char)
    if any(first <= code <= last for first, last in _EMOJI) or code in _JOINS_EMOJI:
        return "EMOJI"
    if unicodedata.category(char)[0] not in "LM":
        return "COMMON" if code < 0x80 else "SIGNS"
    return unicodedata.name(char, "UNNAMED").split()[0].split("-")[0]


def count_characters(
    tables: Iterable[Dataset], tokenizer: PreTrainedTokenizerBase, *, max_tokens: int = MAX_TOKENS
) -> Characters:
    """Count the characters of the rows, and those that the tokenizer breaks; special tokens are left out.

    max_tokens  with more of them, evenly spread chunks of about so many are looked at
    """
    tables, counting = list(tables), _Counting(tokenizer)
    total = sum(int(document_lengths(rows, side).sum()) for rows in tables for side in sides(rows))
    seen = 0
    for rows in tables:
        for chunk in chunks(rows, every=-(-total // max_tokens) or 1):
            counting.take(chunk)
            seen += len(chunk.ids)
    return replace(counting.result(), part=seen / total if total else 1.0)


class _Counting:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._size = max(tokenizer.get_vocab().values(), default=0) + 1
        self._whole = np.zeros(self._size, np.int64)
        self._special = np.zeros(self._size, bool)
        self._special[list(special_ids(tokenizer))] = True
        self._is_part = np.zeros(self._size, bool)
        self._known = self._special.copy()
        self._texts: dict[int, str] = {}
        self._scripts: dict[str, Script] = {}
        self._damaged = 0

    def take(self, chunk: Chunk) -> None:
        counts = np.bincount(chunk.ids, minlength=self._size)
        for token in np.flatnonzero((counts > 0) & ~self._known).tolist():
            self._learn(token)
        self._whole += np.where(self._is_part | self._special, 0, counts)
        for run, count in Counter(_runs(chunk, self._is_part)).items():
            self._take_run(run, count)

    def _learn(self, token: int) -> None:
        self._texts[token] = text = decode(self._tokenizer, [token])
        self._is_part[token], self._known[token] = REPLACEMENT in text, True

    def _take_run(self, run: tuple[int, ...], count: int) -> None:
        """A run of tokens of which none is whole characters; at its edges some may stand."""
        text = decode(self._tokenizer, list(run))
        self._damaged += count * text.count(REPLACEMENT)
        first = len(self._texts[run[0]].rstrip(REPLACEMENT))
        end = len(text) - (len(self._texts[run[-1]].lstrip(REPLACEMENT)) if len(run) > 1 else 0)
        for place, char in enumerate(text):
            self._add(char, count, broken=first <= place < end and not char.isascii())

    def _add(self, char: str, count: int, *, broken: bool = False) -> None:
        if char.isspace() or char == REPLACEMENT:
            return
        script = self._scripts.setdefault(script_of(char), Script())
        script.characters += count
        if broken:
            script.broken += count
            script.examples[char] += count * (ord(char) not in _JOINS_EMOJI)

    def result(self) -> Characters:
        for token in np.flatnonzero(self._whole).tolist():
            for char in self._texts[token]:
                self._add(char, int(self._whole[token]))
        for script in self._scripts.values():
            script.examples = +script.examples  # without what is not seen by itself
        scripts = dict(sorted(self._scripts.items(), key=lambda item: -item[1].characters))
        return Characters(scripts, self._damaged)


def _runs(chunk: Chunk, is_part: np.ndarray) -> Iterator[tuple[int, ...]]:
    """Tokens that are parts of characters, as long as they follow each other in a document."""
    parts = is_part[chunk.ids]
    parts_and_edges = np.concatenate([[False], parts, [False]]).astype(np.int8)
    edges = np.flatnonzero(np.diff(parts_and_edges))
    # A document that ends in a part of a character is followed by another document, not by the character's rest.
    inside = chunk.starts[1:-1]
    cuts = inside[parts[inside] & parts[inside - 1]]
    edges = np.sort(np.concatenate([edges, np.repeat(cuts, 2)]))
    ids = chunk.ids.tolist()
    for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield tuple(ids[first:end])
