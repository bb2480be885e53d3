"""What a JSON schema may say: everything that the masks of grammar.py would not enforce is refused here, by its place.

xgrammar reads past what it cannot enforce (`not`, `uniqueItems`, `minimum` without a type, ...). An answer that breaks
the schema it was promised to follow is worse than a refusal.
"""

import json
import re
from typing import Any

from trainer.config.errors import UserError, require

MAX_SCHEMA_LEN = 65_536
"""Characters of a schema's text."""
MAX_DEPTH = 32
"""Levels of lists and objects in it; xgrammar's time grows with the square (500 levels: 6 s)."""

ANNOTATIONS = frozenset(
    "title description default examples example deprecated readOnly writeOnly $schema $id $comment $defs definitions "
    "contentMediaType contentEncoding".split()
)
BY_TYPE = {
    "object": frozenset("properties required additionalProperties maxProperties patternProperties".split()),
    "array": frozenset("items prefixItems minItems maxItems".split()),
    "string": frozenset("minLength maxLength pattern format".split()),
    "integer": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()),
    "number": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum".split()),
    "boolean": frozenset(),
    "null": frozenset(),
}
"""Type -> the keywords that xgrammar enforces for it (0.2.9; each is tried in tests/serve/test_grammar.py)."""
FORMATS = tuple("date time date-time email ipv4 ipv6 uuid duration".split())


def check_schema(schema: str) -> str:
    """Refuse what is no JSON schema, is too large, or says something that the masks would not enforce.

    returns  the schema in one spelling: of a key that stands twice the last one counts, here and for xgrammar
    raises   UserError naming the place in the schema
    """
    require(
        len(schema) <= MAX_SCHEMA_LEN,
        f"json_schema has {len(schema)} characters; give at most {MAX_SCHEMA_LEN}",
    )
    try:
        root = json.loads(schema, parse_constant=_no_constant)
        depth = _depth(root)
    except RecursionError:
        depth = MAX_DEPTH + 1
    except ValueError as error:
        raise UserError(f"json_schema is no JSON: {error}") from None
    require(depth <= MAX_DEPTH, f"json_schema is nested more than {MAX_DEPTH} levels deep; flatten it")
    require(isinstance(root, dict), f"json_schema: {schema[:40]} is no object; give a schema such as {{}}")
    _check(root, "#")
    return json.dumps(root)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _depth(value: object) -> int:
    if isinstance(value, dict | list):
        return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)
    return 0


def _check(node: object, where: str) -> None:
    """Check a schema and those in it."""
    if node is True:
        return
    _need(isinstance(node, dict), where, "is no schema; give an object, or true")
    for name in ("$defs", "definitions"):
        for key, child in _mapping(node, name, where).items():
            _check(child, f"{where}/{name}/{key}")
    said = set(node) - ANNOTATIONS
    kinds = said & {"$ref", "enum", "const", "anyOf", "allOf", "oneOf"}
    _need(len(kinds) <= 1, where, f"combines {', '.join(sorted(kinds))}; say one of them in a schema")
    for kind in kinds:
        _check_kind(node, kind, said - {kind}, where)
    if not kinds:
        _check_typed(node, said, where)


def _check_kind(node: dict, kind: str, rest: set[str], where: str) -> None:
    """A schema of one of the keywords that say all by themselves."""
    if kind in ("enum", "const"):
        values = node["enum"] if kind == "enum" else [node["const"]]
        _need(isinstance(values, list) and values, where, "has an enum that is no list of values")
        types = _types(node, where)
        _need(
            not types or all(_is_of(value, types) for value in values), where, f"has a value in {kind} that is no type"
        )
        rest = rest - {"type"}
    elif kind == "$ref":
        ref = node["$ref"]
        _need(isinstance(ref, str) and re.match(r"#(/|$)", ref), where, f"has $ref {ref!r}; it must begin with #/")
    else:
        _need(kind != "oneOf", where, "has oneOf, of which only one may hold; use anyOf")
        _need(isinstance(node[kind], list) and node[kind], where, f"has a {kind} that is no list of schemas")
        _need(kind == "anyOf" or len(node[kind]) == 1, where, "has an allOf of several schemas; merge them into one")
        for index, child in enumerate(node[kind]):
            _check(child, f"{where}/{kind}/{index}")
    _need(not rest, where, f"has {', '.join(sorted(rest))} beside {kind}, which would be ignored; move it")


def _check_typed(node: dict, said: set[str], where: str) -> None:
    """A schema that says a type and keywords of it, or nothing."""
    types = _types(node, where)
    if not types and said:  # objects and lists are known by their keywords
        implied = [name for name in ("object", "array") if said & BY_TYPE[name]]
        types = implied if len(implied) == 1 else []
    unknown = said - {"type"} - set().union(*(BY_TYPE[name] for name in types))
    _need(
        not unknown,
        where,
        f"has {', '.join(sorted(unknown))}, which cannot be enforced here; leave it out or add a type",
    )
    if "object" in types:
        _check_object(node, where)
    if "array" in types:
        items = node.get("prefixItems", [])
        _need(isinstance(items, list), where, "has prefixItems that are no list of schemas")
        for index, child in enumerate(items):
            _check(child, f"{where}/prefixItems/{index}")
        if node.get("items", True) is not False:
            _check(node.get("items", True), f"{where}/items")
    if "string" in types:
        _check_string(node, where)
    if "multipleOf" in said:
        alone = not said & {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"} and "number" not in types
        step = node["multipleOf"]
        whole = isinstance(step, int) and not isinstance(step, bool) and step > 0
        _need(alone and whole, where, "has multipleOf; it is enforced for integers, whole and without other limits")


def _check_object(node: dict, where: str) -> None:
    properties, patterns = _mapping(node, "properties", where), _mapping(node, "patternProperties", where)
    for key, child in properties.items():
        _check(child, f"{where}/properties/{key}")
    required = node.get("required", [])
    names = isinstance(required, list) and all(isinstance(name, str) for name in required)
    _need(names, where, "has a required that is no list of names")
    missing = [name for name in required if name not in properties]
    _need(not missing, where, f"requires {missing[:1]}, which is not in its properties; declare it there")
    if patterns:
        alone = not properties and len(patterns) == 1 and node.get("additionalProperties", False) is False
        _need(alone, where, "has patternProperties; only one pattern and no other properties can be enforced")
        for pattern, child in patterns.items():
            _check_pattern(pattern, where)
            _check(child, f"{where}/patternProperties/{pattern}")
    elif node.get("additionalProperties", True) is not False:
        _check(node.get("additionalProperties", True), f"{where}/additionalProperties")


def _check_string(node: dict, where: str) -> None:
    length = {"minLength", "maxLength"} & set(node)
    ways = bool(length) + ("pattern" in node) + ("format" in node)
    _need(ways <= 1, where, "combines pattern, format and length; only one of them is enforced: keep one")
    if "format" in node:
        _need(
            node["format"] in FORMATS, where, f"has format {node['format']!r}; use one of {', '.join(sorted(FORMATS))}"
        )
    if "pattern" in node:
        _need(isinstance(node["pattern"], str), where, "has a pattern that is no string")
        _check_pattern(node["pattern"], where)


def _check_pattern(pattern: str, where: str) -> None:
    """Refuse what xgrammar ignores (lookarounds, inner anchors) or would write into the JSON unescaped."""
    bare = re.sub(r"\\[dDwWsS]|\\[^\w\s\"\\]", "e", pattern)  # escapes that are safe
    without_classes = re.sub(r"\[\^?[^\]]*\]", "c", bare)
    for found, what in (
        (re.search(r"\\", bare), "an escape other than \\d \\w \\s \\D \\W \\S and those of punctuation"),
        (re.search(r"[\"\x00-\x1f]", bare), "a quote or control character, which JSON would have to escape"),
        (re.search(r"\(\?(?!:)", without_classes), "a group other than (...) and (?:...)"),
        (re.search(r"(?<!^)\^|\$(?!$)", without_classes), "^ or $ inside"),
    ):
        _need(not found, where, f"has the pattern {pattern[:60]!r} with {what}; rewrite it")


def _types(node: dict, where: str) -> list[str]:
    types = node.get("type", [])
    types = [types] if isinstance(types, str) else types
    known = isinstance(types, list) and all(isinstance(name, str) and name in BY_TYPE for name in types)
    _need(known, where, f"has type {node.get('type')!r}; use {', '.join(BY_TYPE)}")
    return types


def _is_of(value: object, types: list[str]) -> bool:
    if isinstance(value, bool) or value is None:
        return ("boolean" if isinstance(value, bool) else "null") in types
    match value:
        case int():
            return "integer" in types or "number" in types
        case float():
            return "number" in types
        case str():
            return "string" in types
    return ("object" if isinstance(value, dict) else "array") in types


def _mapping(node: dict, name: str, where: str) -> dict[str, Any]:
    found = node.get(name, {})
    _need(isinstance(found, dict), where, f"has {name} that are no object")
    return found


def _need(condition: object, where: str, message: str) -> None:
    require(bool(condition), f"json_schema: {where} {message}")
