"""Rows of training text, from a JSON Lines file or from the standard library's docstrings.

The first stop of the data: file -> `Row` (here) -> token ids and labels (chat.py) -> batches (loader.py).
A file holds one of three shapes, decided by its first row: `messages`, `prompt` and `completion`, or `text`;
`data.columns.*` says what the file calls them. Every fault in a file is answered with its line.

Lines end at a newline byte and nowhere else: text may hold U+2028 and its like, at which `str.splitlines`
would cut a row in two.
"""

import codecs
import json
import logging
import random
from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from typing import Any, NoReturn, TypeVar

from trainer.config.data import ColumnsConfig, DataConfig, DataSource
from trainer.config.errors import UserError, require
from trainer.data.pydocs import Question, load_questions
from trainer.data.rows import Row

ROLES = ("system", "user", "assistant")

logger = logging.getLogger(__name__)

T = TypeVar("T")
SHAPES = {"messages": ("messages",), "prompt/completion": ("prompt", "completion"), "text": ("text",)}
_JSON_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}


def load_rows(config: DataConfig, seed: int) -> tuple[list[Row], list[Row]]:
    """Read the rows to train on and the rows held out for evaluation. No row is in both.

    seed     chooses the held-out rows of a file that has no `data.eval_path`
    returns  train rows and held-out rows, each in the order of the source; neither is empty
    raises   UserError with file and line for a row that cannot be used, or when too few rows are left
    """
    if config.source is DataSource.pydocs:
        train, held_out = load_questions(eval_rows=config.eval_rows)
        train = [_from_question(question) for question in train[: config.max_rows]]
        held_out = [_from_question(question) for question in held_out]
        logger.info("pydocs: %d questions to train on, %d held out, of other modules", len(train), len(held_out))
        return train, held_out
    rows = read_jsonl(config.path, config.columns, limit=config.max_rows)
    if config.eval_path:
        train, held_out = rows, read_jsonl(config.eval_path, config.columns, limit=config.eval_rows)
    else:
        train, held_out = hold_out(rows, config, seed)
    return drop_copies(train, held_out, config.path, content), held_out


def read_jsonl(path: str, columns: ColumnsConfig, *, limit: int | None = None) -> list[Row]:
    """Read a JSON Lines file, one object a line, UTF-8; blank lines are skipped.

    limit    read the first rows only; faults behind them are not seen
    returns  at least one row; the first one decides which of `SHAPES` the file has
    raises   UserError `file:line: what is wrong; what to do`
    """
    shapes = _mapped_shapes(columns)
    rows: list[Row] = []
    shape, fields = "", ()
    for where, record in islice(records(path), limit):
        if not rows:
            shape, fields = _detect(record, shapes, where)
        elif missing := [name for name in fields if name not in record]:
            lacks = f"no {' and no '.join(missing)} among the fields {', '.join(record) or '(none)'}"
            fail(where, f"{lacks}, but the file's first row is {shape}; give every row the same shape")
        rows.append(_to_row(record, shape, fields, where))
    require(bool(rows), f"{path} holds no rows; write one JSON object a line")
    pairs = zip(SHAPES[shape], fields, strict=True)
    renamed = ", ".join(f"{theirs} -> {ours}" for ours, theirs in pairs if ours != theirs)
    logger.info("%s: %d rows of %s%s", path, len(rows), shape, f" ({renamed})" if renamed else "")
    return rows


def records(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                yield f"{path}:{number}", _parse(line, f"{path}:{number}")


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        fail(where, f"byte {error.start + 1} (0x{line[error.start]:02x}) is not UTF-8; save the file as UTF-8")
    except (ValueError, RecursionError) as error:
        what = getattr(error, "msg", str(error))
        fail(f"{where}:{getattr(error, 'colno', 1)}", f"broken JSON: {what}; write one complete JSON object a line")
    if not isinstance(record, dict):
        fail(where, f"the line is {kind(record)}, not an object; write one JSON object a line")
    return record


def _mapped_shapes(columns: ColumnsConfig) -> dict[str, tuple[str, ...]]:
    """The shapes that may occur, each with the file's names of its fields: one, where data.columns names any."""
    mapped = {ours: theirs for ours, theirs in vars(columns).items() if theirs}
    shapes = {shape: names for shape, names in SHAPES.items() if mapped.keys() & set(names)} or SHAPES
    if mapped and len(shapes) > 1:
        keys = " and ".join(f"data.columns.{name}={theirs}" for name, theirs in mapped.items())
        raise UserError(f"{keys} name different shapes; map messages, or prompt and completion, or text")
    return {shape: tuple(mapped.get(name, name) for name in names) for shape, names in shapes.items()}


def _detect(record: dict[str, Any], shapes: dict[str, tuple[str, ...]], where: str) -> tuple[str, tuple[str, ...]]:
    for shape, fields in shapes.items():
        if all(name in record for name in fields):
            return shape, fields
    wanted = ", or ".join(" and ".join(fields) for fields in shapes.values())
    fail(
        where,
        f"found the fields {', '.join(record) or '(none)'}, but a row needs {wanted}; name the file's fields with "
        "data.columns.messages, data.columns.prompt and data.columns.completion, or data.columns.text",
    )


def _to_row(record: dict[str, Any], shape: str, fields: tuple[str, ...], where: str) -> Row:
    values = [record[name] for name in fields]
    if shape == "messages":
        return Row(to_messages(values[0], fields[0], where), None, where)
    texts = [to_text(value, name, where) for value, name in zip(values, fields, strict=True)]
    return Row(None, texts[0], where) if shape == "text" else Row(exchange(*texts), None, where)


def exchange(prompt: str, completion: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


def _from_question(question: Question) -> Row:
    return Row(exchange(question.prompt, question.answer), None, question.origin)


def to_messages(value: Any, name: str, where: str) -> list[dict[str, str]]:
    if not isinstance(value, list):
        fail(where, f"{name} is {kind(value)}; write a list of {{role, content}} objects")
    messages = [to_message(turn, f"{name}[{index}]", where) for index, turn in enumerate(value)]
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        fail(where, f"{name} has no assistant turn, so there is nothing to learn; add one or remove the row")
    if roles[0] == "assistant":
        fail(where, f"{name} begins with the assistant; put a user or system turn before it")
    for index in range(1, len(roles)):
        if roles[index - 1] == roles[index] == "assistant":
            pair = f"{name}[{index - 1}] and {name}[{index}]"
            fail(where, f"{pair} are both assistant turns; join them or put a user turn between")
    return messages


def to_message(turn: Any, name: str, where: str) -> dict[str, str]:
    if not isinstance(turn, dict):
        fail(where, f"{name} is {kind(turn)}; write an object with role and content")
    if not {"role", "content"} <= turn.keys():
        fail(where, f"{name} has the fields {', '.join(turn) or '(none)'}; it needs role and content")
    if turn["role"] not in ROLES:
        fail(where, f"{name} has the unknown role {turn['role']!r}; accepted: {', '.join(ROLES)}")
    # Fields such as `weight` or `tool_calls` change what ought to be trained, so they are not passed over.
    extra = [key for key, value in turn.items() if key not in ("role", "content") and value is not None]
    if extra:
        fail(where, f"{name} has {', '.join(extra)} besides role and content, which is not supported; remove it")
    content = to_text(turn["content"], f"{name}.content", where, may_be_empty=turn["role"] == "system")
    return {"role": turn["role"], "content": content}


def to_text(value: Any, name: str, where: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        fail(where, f"{name} is {kind(value)}; write a string")
    if not value.strip() and not may_be_empty:
        fail(where, f"{name} is empty; fill it or remove the row")
    if any("\ud800" <= char <= "\udfff" for char in value):
        fail(where, f"{name} has half of a surrogate pair (\\ud800..\\udfff), which no tokenizer takes; remove it")
    return value


def kind(value: Any) -> str:
    return _JSON_NAMES.get(type(value), "a number")


def fail(where: str, what: str) -> NoReturn:
    raise UserError(f"{where}: {what}")


def hold_out(rows: list[T], config: DataConfig, seed: int) -> tuple[list[T], list[T]]:
    """Rows to train on and held-out rows, chosen by `seed`, each in the order of the file."""
    require(len(rows) >= 2, f"{config.path} has 1 row; one more is needed to hold out, or set data.eval_path")
    num_held_out = min(config.eval_rows, max(1, len(rows) // 10))
    draw = random.Random(seed).random  # the one method whose sequence Python promises to keep
    shuffled = sorted(range(len(rows)), key=lambda _: draw())
    held_out = set(shuffled[-num_held_out:])
    logger.info("%s: %d rows held out for evaluation (seed %d)", config.path, num_held_out, seed)
    return (
        [row for index, row in enumerate(rows) if index not in held_out],
        [row for index, row in enumerate(rows) if index in held_out],
    )


def drop_copies(train: list[T], held_out: list[T], path: str, says: Callable[[T], Hashable]) -> list[T]:
    """Train rows without those that say the same as a held-out row."""
    seen = {says(row) for row in held_out}
    kept = [row for row in train if says(row) not in seen]
    if len(kept) < len(train):
        logger.info("%s: %d rows dropped, being copies of held-out rows", path, len(train) - len(kept))
    require(bool(kept), f"{path}: every row is a copy of a held-out row; give other rows, or another data.eval_path")
    return kept


def content(row: Row) -> tuple[Any, ...]:
    """What a row says, without where it says it."""
    return (row.text, *((turn["role"], turn["content"]) for turn in row.messages or ()))
