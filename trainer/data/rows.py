"""What the stops of the data hand to each other: a row, and the error about one.

reading/     a file, folder or hub dataset -> raw rows, each with the place where it stands
shaping/     a raw row's fields            -> Row, Pair or Labelled
rendering/   Row                           -> token ids and labels
table.py     all rows of a source          -> a table on disk; streams/: a window of rows at a time
ordering/    which rows an epoch takes in which order, mixed and packed
loader.py    which of them a step takes, and their tensors
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, NoReturn

from trainer.config.errors import UserError

ROLES = ("system", "user", "assistant", "tool")

Message = dict[str, Any]
"""`role`, out of `ROLES`; `content`, a string, empty only for a system prompt or an assistant that calls tools. An
assistant's may have `tool_calls` (a list of `{"type": "function", "function": {"name": str, "arguments": dict}}`, an
`id` where the row has one) and `reasoning_content` (a string); a tool's `tool_call_id` and `name`. `train: False` says
that the turn is read and not learned."""


class BadRow(UserError):
    """A row that cannot be trained on: an error, or left out and listed where `data.on_bad_row=skip`."""

    def __init__(self, where: str, what: str, *, kind: str) -> None:
        """where: `train.jsonl:12`; what: what is wrong and what to do; kind: a word or two to count by"""
        super().__init__(f"{where}: {what}")
        self.where, self.what, self.kind = where, what, kind

    def __reduce__(self) -> tuple[Any, ...]:
        return _bad_row, (self.where, self.what, self.kind)


def _bad_row(where: str, what: str, kind: str) -> BadRow:
    return BadRow(where, what, kind=kind)


def fail(where: str, what: str, *, kind: str) -> NoReturn:
    raise BadRow(where, what, kind=kind)


@dataclass(frozen=True)
class Row:
    """One conversation, or one plain text, or token ids; the other fields are None."""

    messages: list[Message] | None
    """At least one assistant turn."""
    text: str | None
    origin: str
    """Where the row comes from, for messages to people: `train.jsonl:12` or `pydocs:json.dumps`."""
    prompt_len: int = 0
    """Leading messages, or characters of the text, that are given and never learned: the prompt of an answer that is
    compared with another (preference.py)."""
    tools: list[dict[str, Any]] | None = None
    """What the conversation may call, as OpenAI's API takes it."""
    tokens: tuple[list[int], list[int]] | None = None
    """`input_ids` and `labels` of equal length; a label is its token id or -100."""

    def says(self) -> tuple[Any, ...]:
        """What the row says, without where it says it."""
        return self.text, self.messages, self.tools, self.tokens


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt."""

    chosen: Row
    rejected: Row

    @property
    def origin(self) -> str:
        return self.chosen.origin

    def says(self) -> tuple[Any, ...]:
        return self.chosen.says(), self.rejected.says()


@dataclass(frozen=True)
class Labelled:
    """One answer to a prompt, good or bad."""

    row: Row
    desirable: bool

    @property
    def origin(self) -> str:
        return self.row.origin

    @property
    def prompt(self) -> list[Message]:
        return self.row.messages[: self.row.prompt_len]

    def says(self) -> tuple[Any, ...]:
        return self.row.says()


Preference = Pair | Labelled
Example = Row | Pair | Labelled

TokenRow = dict[str, Any]
"""A row of tokens; tokenizing.py says what is in it."""
Tokenized = list[TokenRow] | BadRow
"""What became of a source row."""


def content_hash(example: Example) -> int:
    """63 bits (Arrow's int64 holds them) that are equal where two rows say the same, wherever they stand."""
    digest = hashlib.sha256(json.dumps(example.says(), sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
