"""Fields of a row of preferences -> `Pair` or `Labelled`: two answers to one prompt, or one called good or bad.

Beside row_shapes.py; preference.py makes token ids and batches of the rows. A pair has `chosen` and `rejected`, each a
text or a list of messages, and a `prompt`; without one the prompt is what both begin with. A labelled answer has
`prompt`, `completion` and a boolean `label`. Only the answer is learned: all of the prompt, earlier assistant turns
included, is masked.
"""

from os.path import commonprefix
from typing import Any

from trainer.data.rows import Labelled, Message, Pair, Row, fail
from trainer.data.shaping.conversations import (
    Aside,
    answered,
    conversation,
    is_assistant,
    require_target,
    to_aside,
    with_system,
)
from trainer.data.shaping.messages import openai_turns
from trainer.data.shaping.row_shapes import Names, Shape
from trainer.data.shaping.values import kind_of, shown, to_text, value_of

_EQUAL = "so nothing is preferred; remove the row"


def to_pair(record: dict[str, Any], names: Names, where: str) -> Pair:
    """names: our fields -> the file's; where: the row's place, for errors. Raises BadRow."""
    fields = names["chosen"], names["rejected"]
    answers = [record[name] for name in fields]
    if isinstance(answers[0], str) and answers[0] == answers[1]:
        fail(where, f"{fields[0]} and {fields[1]} are equal, {_EQUAL}", kind="equal answers")
    prompt, aside = value_of(record, names, "prompt"), to_aside(record, names, where)
    if all(_is_conversation(answer) for answer in answers):
        sides = _conversations(answers, prompt, names, where, aside)
    elif prompt is None:
        sides = _texts(answers, names, where, aside)
    else:
        sides = [
            answered(prompt, value, (names["prompt"], name), where, aside)
            for value, name in zip(answers, fields, strict=True)
        ]
    if _said(sides[0]) == _said(sides[1]):
        fail(where, f"{fields[0]} and {fields[1]} say the same, {_EQUAL}", kind="equal answers")
    return Pair(*sides)


_WRITTEN = {"true": True, "false": False}
"""A label in CSV, where every value is a string."""


def to_labelled(record: dict[str, Any], names: Names, where: str) -> Labelled:
    """See `to_pair`."""
    label = record[names["label"]]
    label = _WRITTEN.get(label.lower(), label) if isinstance(label, str) else label
    if not isinstance(label, bool):
        what = f"{names['label']} is {shown(label)}; write true for a good answer and false for a bad one"
        fail(where, what, kind="label")
    fields = names["prompt"], names["completion"]
    row = answered(*(record[name] for name in fields), fields, where, to_aside(record, names, where))
    return Labelled(row, label)


PAIRS = Shape("chosen, rejected", ("chosen", "rejected"), ("prompt", "system", "tools"), to_pair)
LABELLED = Shape("prompt, completion, label", ("prompt", "completion", "label"), ("system", "tools"), to_labelled)


def _is_conversation(answer: Any) -> bool:
    """Whether it holds its prompt: messages that begin with another than the assistant."""
    return isinstance(answer, list) and bool(answer) and not is_assistant(answer[0])


def _said(row: Row) -> tuple[str | None, list[Message]]:
    return row.text, _words(row.messages or [])


def _words(messages: list[Message]) -> list[Message]:
    """Messages without what says whether they are learned."""
    return [{key: value for key, value in message.items() if key != "train"} for message in messages]


def _conversations(answers: list[Any], prompt: Any, names: Names, where: str, aside: Aside) -> list[Row]:
    """Two whole conversations: what they begin with alike is the prompt."""
    fields = names["chosen"], names["rejected"]
    shown_names = f"{fields[0]} and {fields[1]}"
    rows = [
        conversation(openai_turns(answer, name, where), name, where, aside)
        for answer, name in zip(answers, fields, strict=True)
    ]
    sides = [_words(row.messages) for row in rows]
    turns = zip(*sides, strict=False)
    shared = next((index for index, (one, other) in enumerate(turns) if one != other), min(map(len, sides)))
    for side, name in zip(sides, fields, strict=True):
        if shared == len(side):
            what = f"{shown_names} are equal up to the end of {name}, whose answer is empty; fill it or remove the row"
            fail(where, what, kind="empty")
    if not shared or not all(side[shared]["role"] == "assistant" for side in sides):
        what = f"{shown_names} have different prompts: they differ in turn {shared}, which is not the assistant's"
        fail(where, what, kind="different prompts")
    if not _is_prompt(prompt, sides[0][:shared], names, where, aside):
        what = f"{names['prompt']} is not what {shown_names} begin with; leave it out, or correct it"
        fail(where, what, kind="different prompts")
    for row, name in zip(rows, fields, strict=True):
        require_target(row.messages[shared:], name, where)
    return [Row(row.messages, None, where, shared, row.tools) for row in rows]


def _is_prompt(prompt: Any, beginning: list[Message], names: Names, where: str, aside: Aside) -> bool:
    """Whether both sides begin with it: with its messages, or with a turn that says it."""
    if isinstance(prompt, list):
        turns = openai_turns(prompt, names["prompt"], where)
        return _words(with_system(turns, where, aside)) == beginning
    return prompt is None or any(prompt == message["content"] for message in beginning)


def _texts(answers: list[Any], names: Names, where: str, aside: Aside) -> list[Row]:
    """Two texts without a template: what they begin with alike is the prompt, a last space excepted, as TRL has it."""
    fields = names["chosen"], names["rejected"]
    if not all(isinstance(answer, str) for answer in answers):
        what = " and ".join(f"{name} is {kind_of(value)}" for name, value in zip(fields, answers, strict=True))
        what = f"{what}, and there is no {names['prompt']}; give one, or the whole conversation on both sides"
        fail(where, what, kind="type")
    if aside.system is not None or aside.tools:
        what = f"{fields[0]} and {fields[1]} are texts without turns, which have no system prompt and no tools"
        fail(where, f"{what}; give the field {names['prompt']}", kind="unknown key")
    shared = len(commonprefix([to_text(value, name, where) for value, name in zip(answers, fields, strict=True)]))
    shared -= answers[0][:shared].endswith(" ")
    if not shared:
        what = f"{fields[0]} and {fields[1]} begin differently, so there is no prompt; give the field {names['prompt']}"
        fail(where, what, kind="different prompts")
    for name, value in zip(fields, answers, strict=True):
        if not value[shared:].strip():
            what = f"{name} ends where the two begin to differ, so its answer is empty; give the field prompt"
            fail(where, what, kind="empty")
    return [Row(None, value, where, shared) for value in answers]
