"""What a row's fields may look like, and how they become a `Row`: `SHAPES`.

Under shapes.py, which chooses one of them for a source. Fields are read by our names; the file's come beside them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.config.data import RowFormat
from trainer.data.rows import Example, Message, Row, fail
from trainer.data.shaping.conversations import answered, conversation, exchanges, to_aside
from trainer.data.shaping.messages import exchange, openai_turns, sharegpt_turns
from trainer.data.shaping.values import kind_of, says_nothing, shown, to_text, value_of

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
    unmapped: tuple[str, ...] = ()
    """Fields that are read under these names only."""


def names_of_shape(shape: Shape, mapped: Names) -> Names:
    """Our fields -> the file's. A field that a column is named for is read as that, and as nothing else."""
    read = [ours for ours in (*shape.read, *shape.unmapped) if ours in mapped or ours not in mapped.values()]
    return {ours: mapped.get(ours, ours) for ours in (*shape.needed, *read)}


def _messages(record: dict[str, Any], names: Names, where: str) -> Row:
    name = names["messages"]
    return conversation(openai_turns(record[name], name, where), name, where, to_aside(record, names, where))


def _sharegpt(record: dict[str, Any], names: Names, where: str) -> Row:
    name = names["messages"]
    return conversation(sharegpt_turns(record[name], name, where), name, where, to_aside(record, names, where))


def _alpaca(record: dict[str, Any], names: Names, where: str) -> Row:
    task = to_text(record[names["instruction"]], names["instruction"], where)
    output = to_text(record[names["output"]], names["output"], where)
    about = value_of(record, names, "input")
    if about is not None and to_text(about, names["input"], where, may_be_empty=True).strip():
        task = f"{task}\n\n{about}"
    turns = [*_history(value_of(record, names, "history"), where), *exchange(task, output)]
    return exchanges(turns, where, to_aside(record, names, where))


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
    return exchanges(exchange(to_text(prompt, fields[0], where), to_text(completion, fields[1], where)), where, aside)


def _text(record: dict[str, Any], names: Names, where: str) -> Row:
    return Row(None, to_text(record[names["text"]], names["text"], where), where)


def _tokens(record: dict[str, Any], names: Names, where: str) -> Row:
    name = names["input_ids"]
    ids = _ints(record[name], name, where)
    if not ids:
        fail(where, f"{name} is empty; fill it or remove the row", kind="empty")
    if min(ids) < 0 or max(ids) > _MAX_ID:
        fail(where, f"{name} has {shown(min(ids) if min(ids) < 0 else max(ids))}, which is no token id", kind="tokens")
    _require_no_padding(value_of(record, names, "attention_mask"), name, where, length=len(ids))
    labels = value_of(record, names, "labels")
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
    wrong = (i for i, (label, token) in enumerate(zip(labels, ids, strict=True)) if label not in (_IGNORED, token))
    if labels != ids and (index := next(wrong, None)) is not None:
        what = f"{name}[{index}] is {shown(labels[index])}; write {_IGNORED}, or the token's own id ({ids[index]})"
        fail(where, f"{what}: labels are not shifted", kind="tokens")
    if set(labels) == {_IGNORED}:
        fail(where, f"{name} has no target, for each is {_IGNORED}; remove the row", kind="no target")
    return labels


_ASIDE = ("system", "tools")
SHAPES = {
    RowFormat.messages: Shape("messages", ("messages",), _ASIDE, _messages, ("functions",)),
    RowFormat.sharegpt: Shape("sharegpt", ("messages",), _ASIDE, _sharegpt, ("functions",)),
    RowFormat.alpaca: Shape("alpaca", ("instruction", "output"), ("input", *_ASIDE), _alpaca, ("history",)),
    RowFormat.prompt_completion: Shape("prompt/completion", ("prompt", "completion"), _ASIDE, _prompt_completion),
    RowFormat.text: Shape("text", ("text",), (), _text),
    RowFormat.tokens: Shape("tokens", ("input_ids",), ("labels",), _tokens, ("attention_mask",)),
}
"""A row that could be several, each telling the same, is the first of them."""
