"""A row of tokens as text, with what is learned told apart from what is read."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from trainer.data.loader import IGNORED

MARKS = "⟦", "⟧"
"""Around what is learned, in plain text."""


class Stretch(NamedTuple):
    """Tokens one after the other, all of them targets or none."""

    text: str
    is_target: bool
    num_tokens: int


def stretches(input_ids: Sequence[int], labels: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[Stretch]:
    """The row cut where targets begin and end; special tokens are shown as they are written."""
    pairs = groupby(zip(input_ids, labels, strict=True), key=lambda pair: pair[1] != IGNORED)
    groups = [(is_target, [token for token, _ in group]) for is_target, group in pairs]
    return [Stretch(_decode(tokenizer, ids), is_target, len(ids)) for is_target, ids in groups]


def marked(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, *, max_chars: int = 400) -> str:
    """The row in one line, targets between `MARKS`; long stretches lose their middle."""
    parts = stretches(row["input_ids"], row["labels"], tokenizer)
    limit = max(40, max_chars // max(1, len(parts)))
    texts = (_shortened(part.text, limit).replace("\n", "\\n") for part in parts)
    return "".join(
        f"{MARKS[0]}{text}{MARKS[1]}" if part.is_target else text for part, text in zip(parts, texts, strict=True)
    )


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)
