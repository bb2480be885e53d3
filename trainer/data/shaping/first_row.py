"""Which shape the first row of a source has, where `data.format` does not say it.

Under shapes.py. Nothing is guessed: a row that could be read in two ways is an error that lists them, but for one case
that can be checked. Sets often hold a rendering of their own fields beside them (Alpaca's `text`, UltraChat's
`prompt`); where the fields are found again in it, they are taken.
"""

from collections.abc import Iterator
from typing import Any, NoReturn

from trainer.config.data import RowFormat
from trainer.config.errors import UserError, require
from trainer.data.rows import fail
from trainer.data.shaping.conversations import Aside, conversation
from trainer.data.shaping.messages import openai_turns
from trainer.data.shaping.row_shapes import SHAPES, Names, names_of_shape
from trainer.data.shaping.values import fields_of, plain

_CONVERSATIONS = ("messages", "conversations")
"""What files call a list of turns."""
_CHOICES = tuple(format for format in SHAPES if format is not RowFormat.sharegpt)
"""Shapes that differ in their fields; those of turns differ in the turns."""


def detect(first: dict[str, Any], where: str, mapped: Names) -> RowFormat:
    """The shape of a source from the fields of its first row, which stands at `where`.

    mapped   our fields -> the file's, where `data.columns.*` names them
    raises   UserError where the columns belong to several shapes, or the row could be read in several ways;
             BadRow where the row has none of the shapes
    """
    possible = _possible(mapped)
    names = {format: names_of(format, first, where, mapped) for format in possible}
    fields = {format: [names[format][ours] for ours in SHAPES[format].needed] for format in possible}
    said = {format: [name for name in fields[format] if first.get(name) is not None] for format in possible}
    whole = [format for format in possible if said[format] == fields[format]]
    whole = whole or [format for format in possible if all(name in first for name in fields[format])]
    if not whole:
        _fail_unknown(first, where, fields)
    if not mapped.keys() & set(SHAPES[whole[0]].needed):
        about = [names[whole[0]][ours] for ours in ("input",) if ours in names[whole[0]]]
        _require_one_reading(first, where, whole[0], said, about)
    if whole[0] is RowFormat.messages:
        return _style(first[fields[whole[0]][0]], fields[whole[0]][0], where)
    return whole[0]


def names_of(format: RowFormat, first: dict[str, Any], where: str, mapped: Names) -> Names:
    """Our fields of a shape -> the file's."""
    names = names_of_shape(SHAPES[format], mapped)
    if "messages" in names and "messages" not in mapped:
        names["messages"] = _turns_field(first, where)
    return names


def _turns_field(first: dict[str, Any], where: str) -> str:
    """The file's field with a list of turns."""
    found = [name for name in _CONVERSATIONS if first.get(name) is not None]
    require(
        len(found) < 2,
        f"{where}: found the fields {' and '.join(found)}, and both may be the conversation; choose one with "
        "data.columns.messages",
    )
    return next((name for name in (*found, *_CONVERSATIONS) if name in first), "messages")


def _possible(mapped: Names) -> tuple[RowFormat, ...]:
    """Shapes that read all columns that are named; those that need one of them, if any does."""
    reading = [f for f in _CHOICES if mapped.keys() <= {*SHAPES[f].needed, *SHAPES[f].read}]
    if not reading:
        keys = " and ".join(f"data.columns.{ours}={theirs}" for ours, theirs in mapped.items())
        *others, last = (" and ".join(SHAPES[format].needed) for format in _CHOICES)
        raise UserError(f"{keys} name different shapes; map {', or '.join(others)}, or {last}")
    needing = [format for format in reading if mapped.keys() & set(SHAPES[format].needed)]
    # A field that a column is named for is not what another shape needs.
    free = [f for f in reading if not set(SHAPES[f].needed) & set(mapped.values())]
    return tuple(needing or free or reading)


def _fail_unknown(first: dict[str, Any], where: str, fields: dict[RowFormat, list[str]]) -> NoReturn:
    wanted = ", or ".join(" and ".join(names) for names in fields.values())
    keys = ", or ".join(" and ".join(f"data.columns.{ours}" for ours in SHAPES[format].needed) for format in fields)
    preferred = [name for name in ("chosen", "rejected") if name in first]
    hint = f"; {' and '.join(preferred)} are read with preference.method=dpo or orpo" if preferred else ""
    what = f"found the fields {fields_of(first)}, but a row needs {wanted}; name the file's fields with {keys}{hint}"
    fail(where, what, kind="shape")


def _require_one_reading(
    first: dict[str, Any], where: str, chosen: RowFormat, said: dict[RowFormat, list[str]], about: list[str]
) -> None:
    """What the row has beside the fields of `chosen` tells the same."""
    own = _strings(first, [*said[chosen], *about])
    others = {format: names for format, names in said.items() if format is not chosen and names}
    differing = {f: names for f, names in others.items() if not _tells_the_same(own, _strings(first, names))}
    if differing:
        ways = [f"{SHAPES[f].title} ({', '.join(map(plain, said[f]))})" for f in (chosen, *differing)]
        keys = " or ".join(f"data.format={format.value}" for format in (chosen, *differing))
        raise UserError(f"{where}: could be read as {', or as '.join(ways)}, which differ; choose with {keys}")
    if chosen is RowFormat.prompt_completion and isinstance(first.get("label"), bool):
        raise UserError(
            f"{where}: prompt and completion stand beside label={str(first['label']).lower()}, which calls answers "
            "good or bad; learn from it with preference.method=kto, or learn all answers with "
            "data.format=prompt_completion"
        )


def _strings(first: dict[str, Any], names: list[str]) -> list[str]:
    return [text.strip() for name in names for text in _strings_in(first.get(name)) if text.strip()]


def _strings_in(value: Any) -> Iterator[str]:
    """A text, or what is said in a list of turns."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        turns = [turn for turn in value if isinstance(turn, dict)]
        yield from (
            text for turn in turns for text in (turn.get("content"), turn.get("value")) if isinstance(text, str)
        )


def _tells_the_same(fields: list[str], other: list[str]) -> bool:
    """Whether `other` renders the fields, so that all of them are found in it, or repeats some of them."""
    whole = "\n".join(other)
    return bool(other) and bool(fields) and (all(text in whole for text in fields) or set(other) <= set(fields))


def _style(value: Any, name: str, where: str) -> RowFormat:
    """Whether turns are OpenAI's or ShareGPT's.

    raises   BadRow where there is no turn to tell it from
    """
    turn = value[0] if isinstance(value, list) and value else None
    if isinstance(turn, dict) and "role" not in turn and "from" in turn:
        return RowFormat.sharegpt
    if not (isinstance(turn, dict) and "role" in turn):
        conversation(openai_turns(value, name, where), name, where, Aside(None, "system", None))
    return RowFormat.messages
