"""A template's own opinion of what the assistant says: `{% generation %}` tags, where it has them.

Our mask does not need them (turns.py); where they are, they must agree. They may take in what the template itself
writes around a turn, its header and the newline behind its end, and may leave out the token that ends it.
"""

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from trainer.chat_messages import template_message
from trainer.data.encoding import Encoded
from trainer.data.rows import Row, fail
from trainer.data.template import Template
from trainer.data.turns import Conversation, Turn

_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def check_tags(
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    row: Row,
    conversation: Conversation,
    encoded: Encoded,
    turns: Sequence[Turn],
    *,
    ignored: set[int],
) -> None:
    """Compare the template's tags with the turns, where it has tags.

    turns    the turns that are learned in `encoded`
    ignored  tokens of thinking that is not learned, as data.train_thinking says
    raises   BadRow that shows both
    """
    num_messages = turns[-1].index + 1
    source = template.source(row.origin, row.tools)
    if not _TAG.search(source) or encoded.places is None or encoded.text != conversation.upto(num_messages):
        if not _TAG.search(source) or encoded.text != conversation.whole:
            return
        num_messages = len(row.messages)
    tagged = _tagged(tokenizer, source, row, num_messages)[-len(encoded.ids) :]
    for turn in turns:
        start, end = encoded.first_behind(turn.prompt), encoded.end_of(len(turn.served))
        behind = encoded.end_of(len(turn.text))
        ours = [index not in ignored for index in range(start, end)]
        theirs = [bool(tagged[index]) and index not in ignored for index in range(start, end)]
        if ours[:-1] != theirs[:-1] or (turn is turns[-1] and any(tagged[behind:]) and turn.index == num_messages - 1):
            _refuse(row, turn, encoded, range(start, end), tagged)
    _check_outside(row, conversation, encoded, num_messages, tagged)


def _check_outside(
    row: Row, conversation: Conversation, encoded: Encoded, num_messages: int, tagged: list[int]
) -> None:
    """No tag covers what a user, a tool or the system says."""
    for index in range(num_messages):
        if row.messages[index]["role"] == "assistant" or index + 1 >= num_messages:
            continue
        before = conversation.upto(index) if index else ""
        through = conversation.upto(index + 1)
        if not encoded.text.startswith(through):
            return
        for token in encoded.touching(min(len(before), len(through)), len(through)):
            if tagged[token] and encoded.places[token][0] >= len(before):
                where = f"turn {index} ({row.messages[index]['role']})"
                text = encoded.encoder.decode([encoded.ids[token]])
                fail(
                    row.origin,
                    f"the chat template's generation tags mark {text!r} of {where}; correct tokenizer.chat_template",
                    kind="generation tags",
                )


def _tagged(tokenizer: PreTrainedTokenizerBase, source: str, row: Row, num_messages: int) -> list[int]:
    done = tokenizer.apply_chat_template(
        [template_message(message) for message in row.messages[:num_messages]],
        tools=row.tools or None,
        chat_template=source,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return done["assistant_masks"]


def _refuse(row: Row, turn: Turn, encoded: Encoded, ours: range, tagged: list[int]) -> None:
    near = range(max(0, ours.start - 8), min(len(encoded.ids), ours.stop + 8))
    theirs = encoded.encoder.decode([encoded.ids[index] for index in near if tagged[index]])
    own = encoded.encoder.decode([encoded.ids[index] for index in ours])
    fail(
        row.origin,
        f"the chat template's generation tags mark {theirs[:300]!r} of turn {turn.index}, and the turn is "
        f"{own[:300]!r}; correct tokenizer.chat_template, or remove its tags",
        kind="generation tags",
    )
