"""Which tokens of a rendered conversation are learned.

The turns of turns.py, in tokens (encoding.py): from the first token behind the prompt to the one that ends the turn.
"""

from dataclasses import dataclass, replace

from trainer.data.loader import IGNORED
from trainer.data.rendering.conversation import Conversation
from trainer.data.rendering.encoding import Encoded, Encoder, shared_tail
from trainer.data.rendering.turns import Turn, Turns
from trainer.data.rows import BadRow, Message, Row

Labelled = tuple[list[int], list[int], str]
"""Token ids [T], labels [T], origin."""


@dataclass(frozen=True)
class LearnedText:
    """A text that the template wrote, and the turns that are learned in it."""

    conversation: Conversation
    found: Turns
    text: str
    turns: list[Turn]
    origin: str


def is_trained(message: Message) -> bool:
    return message.get("train") is not False


def parted(encoder: Encoder, text: LearnedText, encoded: Encoded) -> list[tuple[LearnedText, Encoded]]:
    """Give a turn whose first characters merge with its prompt's last ones into one token a row of its own, in which
    the prompt has the tokens that a server gives to the model. Later turns have it as it is merged, as in a server."""
    merged = [turn for turn in text.turns if encoded.len_of(turn.prompt) is None]
    kept, apart = [turn for turn in text.turns if turn not in merged], []
    for turn in merged:
        whole = encoded if text.text == turn.text else encoder.encode(text.origin, turn.text)
        tokens = whole.parted(turn.prompt)
        if tokens is None:
            kept.append(turn)
        else:
            origin = text.origin if len(text.turns) == 1 else f"{text.origin} turn {turn.index}"
            apart.append((replace(text, text=turn.text, turns=[turn], origin=origin), tokens))
    return [*([(replace(text, turns=kept), encoded)] if kept else []), *apart]


def learn_turns(text: LearnedText, encoded: Encoded, *, thinking: bool) -> Labelled:
    """The turns, and nothing else.

    thinking  whether their thinking is learned
    """
    labels = [IGNORED] * len(encoded.ids)
    _learn(text, encoded, labels, thinking=thinking)
    return encoded.ids, labels, text.origin


def learn_all(row: Row, text: LearnedText, encoded: Encoded, *, thinking: bool) -> Labelled:
    """All that is said, but turns that are given or not to be learned; where a conversation became several rows, what
    the row before has not learned."""
    begin = _begin_of_new(row, text, encoded)
    labels = [IGNORED] * begin + encoded.ids[begin:]
    is_whole = text.text == text.conversation.whole
    said = row.messages if is_whole else row.messages[: text.turns[-1].index + 1]
    for index, message in enumerate(said):
        if index < row.prompt_len or not is_trained(message):
            for token in encoded.touching(*text.conversation.place(index, text.text)):
                labels[token] = IGNORED
    _learn(text, encoded, labels, thinking=thinking)
    return encoded.ids, labels, text.origin


def thought(text: LearnedText, encoded: Encoded) -> set[int]:
    """The tokens of the turns' thinking."""
    spans = [span for turn in text.turns for span in text.found.thinking(turn)]
    return {index for start, end in spans for index in encoded.touching(start, end)}


def _learn(text: LearnedText, encoded: Encoded, labels: list[int], *, thinking: bool) -> None:
    for turn in text.turns:
        start, end = encoded.first_behind(turn.prompt), encoded.end_of(len(turn.served))
        labels[start:end] = encoded.ids[start:end]
    for index in () if thinking else thought(text, encoded):
        labels[index] = IGNORED


def _begin_of_new(row: Row, text: LearnedText, encoded: Encoded) -> int:
    """The first token that no earlier row has learned."""
    if text.origin == row.origin or not text.turns:
        return 0
    prompt, index = text.turns[0].prompt, text.turns[0].index
    before = [place for place in range(index) if row.messages[place]["role"] == "assistant"]
    if not before:
        return 0
    try:
        texts = text.conversation.probed(before[-1], index, generation_prompt=True)
    except BadRow:
        texts = ("", "")
    tail = shared_tail(*texts) if texts[0] != texts[1] else ""
    return encoded.end_of(len(prompt) - len(tail))
