"""What the chat template and the tokenizer put around a row's own words, and whether a model can stop there.

Nothing is known of any template by name: it is rendered with words of ours, and what stands before them and not before
a later turn is what it adds by itself. A date is found by another clock.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from datasets import Dataset
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from trainer.data.inspection.chunks import Chunk, chunks
from trainer.data.inspection.hashing import stretch_hashes
from trainer.data.inspection.pieces import decode, special_ids

MAX_ENDS = 8
_WORDS = 3
"""Fewer words than these, special tokens aside, are a marker (`### System:`) and no prompt."""
_QUESTION, _ANSWER, _NEXT, _LAST, _SYSTEM = "zebra question", "walnut answer", "next matter", "last reply", "own rule"
_TURNS = [
    {"role": role, "content": text}
    for role, text in zip(("user", "assistant") * 2, (_QUESTION, _ANSWER, _NEXT, _LAST), strict=True)
]


@dataclass
class Conventions:
    """Over all documents."""

    documents: int = 0
    added: str = ""
    """What the template says before a conversation that has no system prompt."""
    added_documents: int = 0
    """Documents that begin with it."""
    added_to_system: str = ""
    """What it says before a conversation's own system prompt."""
    has_date: bool = False
    """Whether another day gives another text."""
    bos: str | None = None
    bos_expected: bool = False
    """Whether the tokenizer begins a text with it by itself."""
    bos_counts: dict[int, int] = field(default_factory=dict)
    """How many BOS -> in how many documents."""
    unknown: int = 0
    """Tokens that say that the vocabulary has no token for what stood there."""
    ends: dict[str, int] = field(default_factory=dict)
    """The last token of what is learned in one go -> how often; the most frequent first."""
    stretches: int = 0
    """Of how many such ends."""
    stopped: int = 0
    """How many are tokens at which generation stops."""
    end_stops: bool = True
    """Whether generation stops at the most frequent one."""
    stops: list[str] = field(default_factory=list)
    """The tokens at which generation stops."""


def count_conventions(
    tables: Iterable[Dataset], tokenizer: PreTrainedTokenizerBase, stop_ids: Iterable[int]
) -> Conventions:
    """Look at every document, and at the template by itself.

    stop_ids  at which the model's generation_config.json lets generation stop
    """
    found = Conventions(bos=tokenizer.bos_token)
    added_ids = _describe_template(tokenizer, found)
    found.bos_expected = tokenizer("x", verbose=False)["input_ids"][0] == tokenizer.bos_token_id
    ends, bos, only_first = Counter[int](), Counter[int](), _has_other_uses(tokenizer)
    for rows in tables:
        for chunk in chunks(rows):
            found.documents += len(chunk)
            found.added_documents += _beginning_with(chunk, added_ids)
            found.unknown += _unknown(chunk, tokenizer)
            ends.update(_ends(chunk))
            bos.update(_num_bos(chunk, tokenizer.bos_token_id, only_first=only_first))
    stops = set(stop_ids)
    found.bos_counts = dict(sorted(bos.items()))
    found.ends = {decode(tokenizer, [token]): count for token, count in ends.most_common(MAX_ENDS)}
    found.stretches = ends.total()
    found.stopped = sum(count for token, count in ends.items() if token in stops)
    found.end_stops = not ends or ends.most_common(1)[0][0] in stops
    found.stops = [decode(tokenizer, [token]) for token in sorted(stops)]
    return found


# ---- the template by itself


def _describe_template(tokenizer: PreTrainedTokenizerBase, found: Conventions) -> list[int]:
    """Writes what the template adds into `found`; returns the tokens of `added`."""
    if not tokenizer.chat_template:
        return []
    with_system = [{"role": "system", "content": _SYSTEM}, *_TURNS]
    rendered = [[_render(tokenizer, turns, clock) for turns in (_TURNS, with_system)] for clock in ("1", "2")]
    found.has_date = rendered[0] != rendered[1]
    ids = _before_first(tokenizer, _render(tokenizer, _TURNS))
    text = decode(tokenizer, ids)
    if _says_something(text, tokenizer):
        found.added = text
    opening = _render(tokenizer, with_system).partition(_SYSTEM)
    if opening[1] and _says_something(opening[0], tokenizer):
        found.added_to_system = opening[0]
    return ids if found.added else []


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], clock: str | None = None) -> str:
    """What the template writes, with a clock that always says `clock`; empty where it refuses such turns."""
    try:
        source = tokenizer.get_chat_template()
        if clock is not None:
            source = f"{{% macro strftime_now(format) %}}{clock}{{% endmacro %}}{source}"
        return tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False)
    except (TemplateError, ValueError, TypeError):
        return ""


def _before_first(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens that stand before the first turn and not before a later one: BOS, a system prompt nobody wrote."""
    if not all(words in text for words in (_QUESTION, _ANSWER, _NEXT)):
        return []
    first = tokenizer(text[: text.index(_QUESTION)], add_special_tokens=False)["input_ids"]
    between = text[text.index(_ANSWER) + len(_ANSWER) : text.index(_NEXT)]
    later = tokenizer(between, add_special_tokens=False)["input_ids"]
    pairs = zip(first[::-1], later[::-1], strict=False)
    shared = next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(later)))
    return first[: len(first) - shared]


def _has_other_uses(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether BOS also ends documents, or begins each turn, as `<|im_start|>` does."""
    if tokenizer.bos_token_id is None or tokenizer.bos_token_id == tokenizer.eos_token_id:
        return True
    return bool(tokenizer.chat_template) and _render(tokenizer, _TURNS).count(tokenizer.bos_token) > 1


def _says_something(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    for token in special_ids(tokenizer):
        text = text.replace(decode(tokenizer, [token]), " ")
    return len(re.findall(r"\w+", text)) >= _WORDS


# ---- all documents


def _beginning_with(chunk: Chunk, ids: list[int]) -> int:
    if not ids:
        return 0
    starts = chunk.starts[:-1][chunk.lengths >= len(ids)]
    wanted = stretch_hashes(np.array(ids, np.int32), np.array([0]), np.array([len(ids)]))
    return int(np.count_nonzero(stretch_hashes(chunk.ids, starts, starts + len(ids)) == wanted))


def _unknown(chunk: Chunk, tokenizer: PreTrainedTokenizerBase) -> int:
    """Some tokenizers use one token as the unknown and as another one: there nobody can tell."""
    unknown = tokenizer.unk_token_id
    others = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    return 0 if unknown is None or unknown in others else int(np.count_nonzero(chunk.ids == unknown))


def _ends(chunk: Chunk) -> list[int]:
    """The last token of every stretch that is learned in one go."""
    goes_on = np.append(chunk.is_target[1:], False)
    goes_on[chunk.starts[1:] - 1] = False
    return chunk.ids[chunk.is_target & ~goes_on].tolist()


def _num_bos(chunk: Chunk, bos: int | None, *, only_first: bool) -> list[int]:
    """[D]: each document's; only_first: those that it begins with, two at most, where BOS has other uses too."""
    if bos is None:
        return []
    is_bos = chunk.ids == bos
    if only_first:
        seconds = np.minimum(chunk.starts[:-1] + 1, chunk.starts[1:] - 1)
        first = is_bos[chunk.starts[:-1]]
        return (first.astype(int) + (first & is_bos[seconds] & (chunk.lengths > 1))).tolist()
    counts = np.concatenate([[0], np.cumsum(is_bos)])
    return np.diff(counts[chunk.starts]).tolist()
