"""What a row's fields may look like, and how they become a `Row`: `SHAPES`.

Under shapes.py, which chooses one of them for a source. Fields are read by our names; the file's come beside them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.config.data import RowFormat
from trainer.data.conversations import answered, conversation, exchange, openai_turns, sharegpt_turns, to_aside
from trainer.data.rows import Example, Message, Row, fail
from trainer.data.values import kind_of, says_nothing, shown, to_text

Names = dict[str, str]
"""Our fields -> the file's."""
_IGNORED = -100  # a label that is no target
_MAX_ID = 2**31 - 1


@dataclass(frozen=True)
class Shape:
    title: str
    needed: tuple[str, ...]
    """Our fields that each row has."""
    read: tuple[str, ...]
    """Our fields that are read where a row has them."""
    make: Callable[[dict[str, Any], Names, str], Example]
    """(fields, names, where) -> a row; raises BadRow."""


def _messages(record: dict[str, Any], names: Names, where: str) -> Row:
    name = names["messages"]
    return conversation(openai_turns(record[name], name, where), name, where, to_aside(record, names, where))


def _sharegpt(record: dict[str, Any], names: Names, where: str) -> Row:
    name = names["messages"]
    return conversation(sharegpt_turns(record[name], name, where), name, where, to_aside(record, names, where))


def _alpaca(record: dict[str, Any], names: Names, where: str) -> Row:
    task = to_text(record[names["instruction"]], names["instruction"], where)
    output = to_text(record[names["output"]], names["output"], where)
    about = record.get(names["input"])
    if about is not None and to_text(about, names["input"], where, may_be_empty=True).strip():
        task = f"{task}\n\n{about}"
    turns = [*_history(record.get("history"), where), *exchange(task, output)]
    return conversation(turns, f"history + {names['output']}", where, to_aside(record, names, where))


def _history(value: Any, where: str) -> list[Message]:
    """Alpaca's earlier turns: a list of [user, assistant]."""
    if says_nothing(value):
        return []
    if not isinstance(value, list):
        fail(where, f"history is {kind_of(value)}; write a list of [user, assistant] pairs", kind="type")
    turns: list[Message] = []
    for index, pair in enumerate(value):
        if not (isinstance(pair, list) and len(pair) == 2):
            fail(where, f"history[{index}] is no [user, assistant] pair; write two strings", kind="type")
        turns += exchange(*(to_text(text, f"history[{index}][{side}]", where) for side, text in enumerate(pair)))
    return turns


def _prompt_completion(record: dict[str, Any], names: Names, where: str) -> Row:
    fields = names["prompt"], names["completion"]
    prompt, completion = (record[name] for name in fields)
    aside = to_aside(record, names, where)
    if isinstance(prompt, list) or isinstance(completion, list):
        return answered(prompt, completion, fields, where, aside)
    turns = exchange(to_text(prompt, fields[0], where), to_text(completion, fields[1], where))
    before = [] if aside.system is None else [{"role": "system", "content": aside.system}]
    return Row([*before, *turns], None, where, tools=aside.tools)


def _text(record: dict[str, Any], names: Names, where: str) -> Row:
    return Row(None, to_text(record[names["text"]], names["text"], where), where)


def _tokens(record: dict[str, Any], names: Names, where: str) -> Row:
    name = names["input_ids"]
    ids = _ints(record[name], name, where)
    if not ids:
        fail(where, f"{name} is empty; fill it or remove the row", kind="empty")
    if min(ids) < 0 or max(ids) > _MAX_ID:
        fail(where, f"{name} has {shown(min(ids) if min(ids) < 0 else max(ids))}, which is no token id", kind="tokens")
    _require_no_padding(record.get("attention_mask"), name, where, length=len(ids))
    labels = record.get(names["labels"])
    return Row(None, None, where, tokens=(ids, list(ids) if labels is None else _labels(labels, ids, names, where)))


def _ints(value: Any, name: str, where: str) -> list[int]:
    if not isinstance(value, list):
        fail(where, f"{name} is {kind_of(value)}; write a list of integers", kind="type")
    if not set(map(type, value)) <= {int}:
        index = next(index for index, item in enumerate(value) if type(item) is not int)
        fail(where, f"{name}[{index}] is {shown(value[index])}; write a list of integers", kind="type")
    return value


def _require_no_padding(mask: Any, name: str, where: str, *, length: int) -> None:
    if mask is not None and _ints(mask, "attention_mask", where) != [1] * length:
        what = f"attention_mask is not {length} ones, as many as {name} has ids, so some of them are padding"
        fail(where, f"{what}; write rows without padding, and leave attention_mask out", kind="tokens")


def _labels(value: Any, ids: list[int], names: Names, where: str) -> list[int]:
    name, labels = names["labels"], _ints(value, names["labels"], where)
    if len(labels) != len(ids):
        what = f"{name} has {len(labels)} entries and {names['input_ids']} {len(ids)}; give each token one"
        fail(where, what, kind="tokens")
    for index, (label, token_id) in enumerate(zip(labels, ids, strict=True)):
        if label not in (_IGNORED, token_id):
            what = f"{name}[{index}] is {shown(label)}; write {_IGNORED}, or the token's own id ({token_id})"
            fail(where, f"{what}: labels are not shifted", kind="tokens")
    if all(label == _IGNORED for label in labels):
        fail(where, f"{name} has no target, for each is {_IGNORED}; remove the row", kind="no target")
    return labels


_ASIDE = ("system", "tools")
SHAPES = {
    RowFormat.messages: Shape("messages", ("messages",), _ASIDE, _messages),
    RowFormat.sharegpt: Shape("sharegpt", ("messages",), _ASIDE, _sharegpt),
    RowFormat.alpaca: Shape("alpaca", ("instruction", "output"), ("input", *_ASIDE), _alpaca),
    RowFormat.prompt_completion: Shape("prompt/completion", ("prompt", "completion"), _ASIDE, _prompt_completion),
    RowFormat.text: Shape("text", ("text",), (), _text),
    RowFormat.tokens: Shape("tokens", ("input_ids",), ("labels",), _tokens),
}
"""A row that could be several, each telling the same, is the first of them."""
EARLIER_WORDS = ("functions", "history", "attention_mask")
"""Fields that are read under these names only."""
