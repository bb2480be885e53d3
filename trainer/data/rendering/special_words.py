"""Special tokens that stand in what somebody says: `<|im_end|>` written by a user, `<s>` in a web page.

A tokenizer reads them as if the chat template had written them: a turn ends where nobody ended it, and a stranger's
text can open one that looks like the assistant's. The server reads its requests in the same way, so such rows are
trained on; but they are counted and named. Plain texts are left alone: somebody may have rendered them.
"""

import json
import re
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from trainer.chat_messages import REASONING
from trainer.data.rows import Example, Labelled, Message, Pair, Row


class SpecialWords:
    """One tokenizer's special tokens, as they are written."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        words = sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, filter(None, words))) or r"(?!)")

    def first_in(self, example: Example) -> str:
        """The first one that a message holds; empty where none does."""
        found = (self._pattern.search(text) for message in _messages(example) for text in _texts(message))
        return next((match[0] for match in found if match), "")


def _messages(example: Example) -> list[Message]:
    match example:
        case Row():
            return example.messages or []
        case Labelled():
            return example.row.messages or []
        case Pair():
            return [*(example.chosen.messages or []), *(example.rejected.messages or [])]


def _texts(message: Message) -> Iterator[str]:
    yield from (message[name] for name in ("content", *REASONING) if message.get(name))
    if message.get("tool_calls"):
        yield json.dumps(message["tool_calls"], ensure_ascii=False)
