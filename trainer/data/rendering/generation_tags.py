"""A template's own opinion of what the assistant says: `{% generation %}` tags, where it has them.

Our mask does not need them (turns.py); where they are, they must agree. They may take in what the template itself
writes around a turn, its header and the newline behind its end, and may leave out the token that ends it.
"""

import re

from transformers import PreTrainedTokenizerBase

from trainer.chat_messages import template_message
from trainer.data.rendering.encoding import Encoded
from trainer.data.rendering.targets import LearnedText, thought
from trainer.data.rendering.template import Template
from trainer.data.rendering.turns import Turn
from trainer.data.rows import BadRow, Row, fail

_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def check_tags(
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    row: Row,
    text: LearnedText,
    encoded: Encoded,
    *,
    thinking: bool,
) -> None:
    """Compare the template's tags with the turns, where it has tags.

    thinking  whether it is learned; if not, the tags may say of it what they like
    raises    BadRow that shows both
    """
    if not _TAG.search(template.source(row.origin, row.tools)) or encoded.places is None:
        return
    num_messages = next((count for count in (len(row.messages), text.turns[-1].index + 1) if _is(text, count)), None)
    if num_messages is None:
        return
    tagged = _tagged(tokenizer, template, row, num_messages)[-len(encoded.ids) :]
    ignored = set() if thinking else thought(text, encoded)
    for turn in text.turns:
        ours = range(encoded.first_behind(turn.prompt), encoded.end_of(len(turn.served)))
        if not all(tagged[index] or index in ignored for index in ours[:-1]):
            _refuse(row, turn, encoded, ours, tagged)
    for index, message in enumerate(row.messages[: num_messages - 1]):
        if message["role"] != "assistant":
            _check_untagged(row, text, encoded, index, tagged)


def _is(text: LearnedText, num_messages: int) -> bool:
    return text.text == text.conversation.upto(num_messages)


def _check_untagged(row: Row, text: LearnedText, encoded: Encoded, index: int, tagged: list[int]) -> None:
    """No tag covers what a user, a tool or the system says."""
    try:
        start, end = text.conversation.place_of_content(index, text.text)
    except BadRow:
        return  # the template does not let itself be asked
    for token in encoded.touching(start, end):
        if tagged[token] and encoded.places[token][0] >= start:
            fail(
                row.origin,
                f"the chat template's generation tags mark {encoded.encoder.decode([encoded.ids[token]])!r} of turn "
                f"{index} ({row.messages[index]['role']}); correct tokenizer.chat_template, or remove its tags",
                kind="generation tags",
            )


def _tagged(tokenizer: PreTrainedTokenizerBase, template: Template, row: Row, num_messages: int) -> list[int]:
    done = tokenizer.apply_chat_template(
        [template_message(message) for message in row.messages[:num_messages]],
        tools=row.tools or None,
        chat_template=template.source(row.origin, row.tools),
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
