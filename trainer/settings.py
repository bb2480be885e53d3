"""Dataclass settings on a command line: `key=value` arguments in, help text out.

The string below each field of a schema is its documentation; `--help` prints it, so there is no second text to keep.
"""

import ast
import difflib
import inspect
import textwrap
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.errors import UserError, require


def describe(settings: Any) -> str:
    """Every key of a dataclass instance with its value and the string below its field, for --help."""
    lines = []
    for key, owner, name in _fields(settings):
        doc = " ".join(_field_docs(type(owner))[name].split())
        lines += textwrap.wrap(
            doc, 120, initial_indent=f"  {f'{key} = {_shown(getattr(owner, name))}':<38} ", subsequent_indent=" " * 41
        )
    return "\n".join(lines)


def read_settings(schema: type, arguments: list[str]) -> Any:
    """An instance of a flat dataclass from `key=value` arguments; values are read as YAML.

    raises  UserError for an unknown key, a wrong type or a value that the schema refuses
    """
    names = list(schema.__dataclass_fields__)
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        require(bool(equals), f"{argument} is no setting; write key=value, see --help")
        if key not in names:
            close = difflib.get_close_matches(key, names, n=2, cutoff=0.6)
            hint = f"did you mean {' or '.join(close)}?" if close else "see --help"
            raise UserError(f"{key} is not a key; {hint}")
    try:
        given = OmegaConf.from_dotlist(arguments)
        for key, _, text in (argument.partition("=") for argument in arguments):
            if schema.__dataclass_fields__[key].type in (str, str | None) and given[key] is not None:
                given[key] = text  # as it was typed: YAML reads api_key=0123 as 83
        merged = OmegaConf.merge(OmegaConf.structured(schema), given)
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise UserError(f"{' '.join(arguments)}: {str(error).splitlines()[0]}") from None


def _fields(settings: Any, prefix: str = "") -> list[tuple[str, Any, str]]:
    """(dotted key, the dataclass that holds it, field name), nested dataclasses flattened."""
    fields = []
    for name in settings.__dataclass_fields__:
        value = getattr(settings, name)
        if is_dataclass(value):
            fields += _fields(value, f"{prefix}{name}.")
        else:
            fields.append((f"{prefix}{name}", settings, name))
    return fields


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return value.value if isinstance(value, Enum) else str(value)


@cache
def _field_docs(schema: type) -> dict[str, str]:
    """Field -> the string that stands below it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(schema))).body[0].body
    return {
        field.target.id: ast.literal_eval(doc.value)
        for field, doc in zip(body, body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }
