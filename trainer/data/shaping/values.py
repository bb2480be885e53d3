"""What a field of a row may hold: strings that a tokenizer takes, and plain JSON; and how errors show the others.

Under conversations.py and shapes.py. A row comes from a stranger's file, so nothing here trusts a type, and nothing
shows more than a line of what it found.
"""

import json
import math
import reprlib
from typing import Any

from trainer.data.rows import fail

MAX_DEPTH = 64
"""Objects within objects: more is no tool's schema, and templates that walk it would end in Python's own limit."""
_NUM_NAMES, _NAME_LEN = 20, 60  # fields of a row that an error lists, and characters of each
_JSON_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
_NUMBERS = (int, float)

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80
shown = _repr.repr
"""A value for an error, in one short line."""


def kind_of(value: Any) -> str:
    """A value's type in JSON's words, for an error."""
    if isinstance(value, _NUMBERS) and not isinstance(value, bool):
        return "a number"
    return _JSON_NAMES.get(type(value), f"of type {type(value).__name__}")


def fields_of(record: dict[str, Any]) -> str:
    """The fields of a row or a turn, for an error."""
    names = [plain(name) for name, _ in zip(record, range(_NUM_NAMES), strict=False)]
    more = len(record) - len(names)
    return ", ".join(names + [f"and {more} more"] * (more > 0)) or "(none)"


def value_of(record: dict[str, Any], names: dict[str, str], ours: str) -> Any:
    """What a row has in one of our fields; None where it has none, or the file's is read as another of ours."""
    return record.get(names[ours]) if ours in names else None


def plain(name: Any) -> str:
    """A field's name, cut and fit to be printed."""
    name = str(name)[:_NAME_LEN]
    return name if name.isascii() and name.isprintable() else name.encode("unicode_escape", "replace").decode()


def says_nothing(value: Any) -> bool:
    """Whether it is null or empty, as a table has it in each row that has no such field."""
    return value is None or (isinstance(value, (str, list, dict)) and not value)


def to_text(value: Any, name: str, where: str, *, may_be_empty: bool = False) -> str:
    """`value`, if it is a string that can be tokenized.

    name     the field, for errors
    raises   BadRow: no string (type), nothing but spaces (empty), half of a surrogate pair (surrogate)
    """
    if not isinstance(value, str):
        fail(where, f"{name} is {kind_of(value)}; write a string", kind="type")
    if not may_be_empty and (not value or value.isspace()):
        fail(where, f"{name} is empty; fill it or remove the row", kind="empty")
    if not value.isascii() and not is_unicode(value):
        what = "has half of a surrogate pair (\\ud800..\\udfff), which no tokenizer takes; remove it"
        fail(where, f"{name} {what}", kind="surrogate")
    return value


def is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def to_json(value: Any, name: str, where: str, *, kind: str, depth: int = 0) -> Any:
    """`value`, if it is plain JSON, as deep as `MAX_DEPTH`, whose strings can be tokenized.

    raises   BadRow
    """
    if depth > MAX_DEPTH:
        fail(where, f"{name} is nested deeper than {MAX_DEPTH} levels; flatten it", kind=kind)
    if isinstance(value, str):
        to_text(value, name, where, may_be_empty=True)
    elif isinstance(value, dict):
        for key, item in value.items():
            to_text(key, f"a key of {name}", where, may_be_empty=True)
            to_json(item, name, where, kind=kind, depth=depth + 1)
    elif isinstance(value, list):
        for item in value:
            to_json(item, name, where, kind=kind, depth=depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        fail(where, f"{name} holds {value}, which is no JSON; write a number or null", kind=kind)
    elif value is not None and not isinstance(value, (bool, *_NUMBERS)):
        fail(where, f"{name} holds a value {kind_of(value)}, which is no JSON; write a string", kind=kind)
    return value


def parse_json(value: str, name: str, where: str, *, kind: str) -> Any:
    """What a string of JSON says.

    raises   BadRow
    """
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        fail(where, f"{name} is no JSON: {shown(value)}: {getattr(error, 'msg', error)}; correct it", kind=kind)
