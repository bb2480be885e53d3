"""Which shape a source's rows have: its first row decides, or `data.format`; then each row is made by it.

Between readers.py (raw rows) and chat.py (token ids). `data.columns.*` says what the file calls our fields. A setting
that would not be read is an error, and so is a later row that has another shape.
"""

from dataclasses import dataclass
from typing import Any

from trainer.config.data import RowFormat, SourceConfig
from trainer.config.errors import require
from trainer.config.preference import Method
from trainer.data.rows import Example, fail
from trainer.data.shaping.first_row import detect, names_of
from trainer.data.shaping.preference_shapes import LABELLED, PAIRS
from trainer.data.shaping.row_shapes import SHAPES, Names, Shape, names_of_shape
from trainer.data.shaping.values import fields_of, plain, says_nothing, value_of


@dataclass(frozen=True)
class Shaper:
    """Makes rows of one source's fields; can be pickled."""

    shape: Shape
    names: Names
    """Our fields -> the file's."""
    needed: tuple[str, ...]
    """The file's fields that each row has."""
    lacking: str
    """What an error says behind the fields that a row has and lacks."""
    description: str
    """For people: `prompt/completion (question -> prompt, answer -> completion)`."""

    def row(self, record: dict[str, Any], where: str) -> Example:
        """A row's fields, JSON values, as what is trained on.

        where    the row's place, for errors: `train.jsonl:12`
        raises   BadRow; of kind `shape` where a needed field is missing
        """
        for name in self.needed:
            if name not in record:
                missing = " and no ".join(name for name in self.needed if name not in record)
                fail(where, f"no {missing} among the fields {fields_of(record)}{self.lacking}", kind="shape")
        return self.shape.make(record, self.names, where)


def make_shaper(first: dict[str, Any], where: str, source: SourceConfig, method: Method) -> Shaper:
    """Decide what the rows of a source look like.

    first    the fields of its first row, which stands at `where`
    raises   UserError where settings do not fit each other or the row, or where it could be read in several ways;
             BadRow where it has none of the shapes, so that the next row may decide
    """
    mapped = {ours: theirs for ours, theirs in vars(source.columns).items() if theirs}
    if method is not Method.none:
        return _preferences(first, where, source.format, mapped, method)
    _require_no_preferences(mapped)
    format = source.format
    if format is RowFormat.auto:
        format = detect(first, where, mapped)
    else:
        _require_read(SHAPES[format], mapped, f"data.format={format.value}")
    shape, names = SHAPES[format], names_of(format, first, where, mapped)
    if missing := [ours for ours in shape.needed if names[ours] not in first]:
        needs = f"data.format={format.value} needs {' and '.join(names[ours] for ours in shape.needed)}"
        keys = " and ".join(f"data.columns.{ours}" for ours in missing)
        what = f"found the fields {fields_of(first)}, but {needs}; name the file's fields with {keys}"
        fail(where, what, kind="shape")
    lacking = f", but the file's first row is {shape.title}; give every row the same shape"
    needed = tuple(names[ours] for ours in shape.needed)
    _require_found(shape, first, where, mapped)
    _require_apart(names)
    return Shaper(shape, names, needed, lacking, _describe(shape, first, names))


def _preferences(
    first: dict[str, Any], where: str, format: RowFormat, mapped: dict[str, str], method: Method
) -> Shaper:
    shape = PAIRS if method.of_pairs else LABELLED
    chosen = f"preference.method={method.value}"
    require(
        format is RowFormat.auto,
        f"data.format={format.value} has no effect with {chosen}, whose rows have {shape.title}; leave it out",
    )
    _require_read(shape, mapped, chosen)
    names = names_of_shape(shape, mapped)
    # The prompt of a pair may be missing, but not where a column is named for it.
    needed = tuple(dict.fromkeys(names[ours] for ours in (*shape.needed, *(["prompt"] if "prompt" in mapped else []))))
    keys = ", ".join(f"data.columns.{ours}" for ours in dict.fromkeys(("prompt", *shape.needed)))
    lacking = f"; {chosen} needs {', '.join(needed)}; name the file's fields with {keys}"
    shaper = Shaper(shape, names, needed, lacking, _describe(shape, first, names))
    if not all(name in first for name in needed):
        shaper.row(first, where)  # raises
    _require_found(shape, first, where, mapped)
    _require_apart(names)
    return shaper


def _describe(shape: Shape, first: dict[str, Any], names: Names) -> str:
    read = (*shape.read, *shape.unmapped)
    found = [ours for ours in read if not says_nothing(value_of(first, names, ours))]
    renamed = [f"{plain(names[ours])} -> {ours}" for ours in (*shape.needed, *found) if names[ours] != ours]
    beside = f" with {', '.join(found)}" if found else ""
    return f"{shape.title}{beside}{' (' + ', '.join(renamed) + ')' if renamed else ''}"


# ---- settings that fit


def _shown(mapped: dict[str, str]) -> str:
    return " and ".join(f"data.columns.{ours}={theirs}" for ours, theirs in mapped.items())


def _require_no_preferences(mapped: dict[str, str]) -> None:
    for ours, methods in (("chosen", "dpo or orpo"), ("rejected", "dpo or orpo"), ("label", "kto")):
        require(
            ours not in mapped,
            f"data.columns.{ours}={mapped.get(ours)} has no effect with preference.method=none; leave it out, or set "
            f"preference.method={methods}",
        )


def _require_read(shape: Shape, mapped: dict[str, str], chosen: str) -> None:
    """Each named column is one that the shape reads."""
    unread = {ours: theirs for ours, theirs in mapped.items() if ours not in (*shape.needed, *shape.read)}
    require(
        not unread,
        f"{_shown(unread)} has no effect with {chosen}, whose rows have {', '.join((*shape.needed, *shape.read))}; "
        "leave it out",
    )


def _require_apart(names: Names) -> None:
    """No two of our fields are one of the file's."""
    for theirs in names.values():
        ours = [f"data.columns.{key}" for key, name in names.items() if name == theirs]
        require(len(ours) < 2, f"{' and '.join(ours)} are both {theirs}; name the file's field of each")


def _require_found(shape: Shape, first: dict[str, Any], where: str, mapped: dict[str, str]) -> None:
    """Columns that rows may lack are in the first one where they are named: a name misspelt would pass unseen."""
    lost = {ours: mapped[ours] for ours in shape.read if ours in mapped and mapped[ours] not in first}
    require(
        not lost,
        f"{where}: {_shown(lost)} is not among the fields {fields_of(first)}; correct it, or write the field in the "
        "first row, with null where there is nothing",
    )
