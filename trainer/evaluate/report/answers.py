"""Two answers to one prompt with what differs marked, word by word."""

import re
from collections.abc import Iterator
from difflib import SequenceMatcher

from trainer.page.text import escaped

WORDS = re.compile(r"\s+|[^\s]+")
MAX_WORDS = 1500
"""Comparing costs the square of them; of longer answers only the beginnings are compared."""


def compared(base: str, tuned: str) -> tuple[str, str]:
    """Both answers as HTML: words that one of them has and the other has not at that place are marked."""
    ours, theirs = ([*WORDS.findall(text)][:MAX_WORDS] for text in (base, tuned))
    blocks = SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()
    left = "".join(_part(ours[a:b], kind != "equal", "gone") for kind, a, b, _, _ in blocks)
    right = "".join(_part(theirs[a:b], kind != "equal", "new") for kind, _, _, a, b in blocks)
    return left + _rest(base, ours), right + _rest(tuned, theirs)


def _part(words: list[str], differs: bool, kind: str) -> str:
    text = escaped("".join(words))
    return f'<mark class="{kind}">{text}</mark>' if differs and text else text


def _rest(text: str, words: list[str]) -> str:
    return escaped(text[sum(map(len, words)) :])


def shared_words(base: str, tuned: str) -> int:
    """How many words both begin with."""
    return sum(1 for _ in _shared(base.split(), tuned.split()))


def _shared(base: list[str], tuned: list[str]) -> Iterator[str]:
    for ours, theirs in zip(base, tuned, strict=False):
        if ours != theirs:
            return
        yield ours
