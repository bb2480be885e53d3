"""Whether a chat template shows all that a row says. Some drop system turns, tools or thinking without a word.

Every field gets marks, characters that occur nowhere in the row, and the marked row is rendered once more: a mark that
does not come out stands in what the template leaves out. An assistant's turn may be shortened once others follow it,
for the server shortens it too; it must be whole where it is the newest. What a mark seems to have lost is tried again
alone, with a letter for the mark.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.chat_messages import REASONING
from trainer.data.rendering.conversation import Conversation
from trainer.data.rendering.turns import Turn
from trainer.data.rows import BadRow, Message, Row, fail

_PRIVATE = range(0xE000, 0xF8FF)
_START = re.compile(r"\s*(?:<think>)?")


@dataclass(frozen=True)
class _Spot:
    """A place in a row where a mark can stand."""

    message: int
    field: str
    place: int
    """Where in the string; in `tool_calls` which call, twice: its name and its arguments."""

    def marked(self, message: Message, mark: str) -> Any:
        """The field's value with the mark."""
        value = message[self.field]
        if isinstance(value, str):
            return value[: self.place] + mark + value[self.place :]
        call = value[self.place // 2]
        function = call["function"]
        if self.place % 2:
            function = {**function, "arguments": {**(function.get("arguments") or {}), mark: mark}}
        else:
            function = {**function, "name": function["name"] + mark}
        return [*value[: self.place // 2], {**call, "function": function}, *value[self.place // 2 + 1 :]]


def check_shown(conversation: Conversation, row: Row, turns: Sequence[Turn], num_messages: int) -> None:
    """raises  BadRow: the template leaves out a part of the first messages, or a tool"""
    learned = {turn.index: turn.is_written for turn in turns}
    spots = [
        spot
        for index, message in enumerate(row.messages[:num_messages])
        if learned.get(index, True)
        for spot in _spots(index, message, thinking=index in learned)
    ]
    char = _unused_char(row)
    shown = _shown(conversation, spots, num_messages, char)
    for number, spot in enumerate(spots):
        if number not in shown and not _shown_alone(conversation, row, spot, num_messages):
            message = row.messages[spot.message]
            fail(
                row.origin,
                f"the chat template leaves out {_name(spot, message)} of turn {spot.message} ({message['role']}), so "
                "the model would never see it; remove it, or use a model whose template writes it",
                kind=f"template leaves out {spot.field}",
            )
    if row.tools:
        _check_tools(conversation, row, num_messages)


def _spots(index: int, message: Message, *, thinking: bool) -> Iterator[_Spot]:
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        if thinking or message["role"] != "assistant" or "</think>" not in content:
            yield _Spot(index, "content", _START.match(content).end())
        if thinking:
            yield from (_Spot(index, "content", found.start()) for found in re.finditer("</think>", content))
        yield _Spot(index, "content", len(content))
    for name in REASONING[:1] if thinking else ():
        if isinstance(message.get(name), str) and message[name].strip():
            yield from (_Spot(index, name, place) for place in (0, len(message[name])))
    yield from (_Spot(index, "tool_calls", place) for place in range(2 * len(message.get("tool_calls") or ())))


def _shown(conversation: Conversation, spots: list[_Spot], num_messages: int, char: str) -> set[int]:
    """The spots whose marks come out."""
    messages = list(conversation.messages[:num_messages])
    for number in reversed(range(len(spots))):  # from the back, so that places stay where they are
        spot, message = spots[number], messages[spots[number].message]
        messages[spot.message] = {**message, spot.field: spot.marked(message, f"{char}{number}{char}")}
    try:
        text = conversation.render(messages)
    except BadRow:
        return set()
    return {int(number) for number in re.findall(f"{char}(\\d+){char}", text)}


def _shown_alone(conversation: Conversation, row: Row, spot: _Spot, num_messages: int) -> bool:
    message = row.messages[spot.message]
    upto = [spot.message + 1] if message["role"] == "assistant" else [num_messages]
    for count in upto:
        try:
            texts = [
                conversation.changed(spot.message, count, {spot.field: spot.marked(message, letter)}) for letter in "ab"
            ]
        except BadRow:
            return True  # a template that looks at the text so closely does not leave it out
        if texts[0] != texts[1]:
            return True
    return False


def _check_tools(conversation: Conversation, row: Row, num_messages: int) -> None:
    fewer = conversation.with_tools(row.tools[:-1] or None)
    if fewer.upto(num_messages) == conversation.upto(num_messages):
        fail(
            row.origin,
            "the chat template does not look at tools, so the model would never see them; describe them in a system "
            "turn, or use a model whose template writes them",
            kind="template leaves out tools",
        )


def _name(spot: _Spot, message: Message) -> str:
    if spot.field == "tool_calls":
        return f"tool_calls[{spot.place // 2}]{'.function.arguments' if spot.place % 2 else ''}"
    if message["role"] == "assistant" and spot.field == "content" and "</think>" in message["content"][spot.place :]:
        return "what content has before </think>"
    return spot.field


def _unused_char(row: Row) -> str:
    said = json.dumps(row.messages, ensure_ascii=False, default=str)
    return next(chr(code) for code in _PRIVATE if chr(code) not in said)
