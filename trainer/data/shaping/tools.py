"""Tools in rows: what a conversation may call, the calls of an assistant's turn, and which result answers which call.

Under conversations.py. Files write arguments as a string of JSON (OpenAI) or as an object; templates want the object,
and the server makes it one too. The older `functions` and `function_call` mean the same and become the same.
"""

from typing import Any

from trainer.data.rows import Message, fail
from trainer.data.shaping.values import fields_of, kind_of, parse_json, says_nothing, shown, to_json, to_text

_TOOL = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
_CALL = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
_WRITTEN_CALL = "<tool_call>"
"""Hermes' rows, and Qwen's template, write a call into the text, where it has no id and is not counted."""


def to_tools(value: Any, name: str, where: str) -> list[dict[str, Any]] | None:
    """A row's tools as OpenAI's API takes them; bare functions get their `type`, a string of JSON is read.

    returns  a list of at least one tool, or None where the row has none
    raises   BadRow of kind `tools`
    """
    if isinstance(value, str) and value.strip():
        value = parse_json(value, name, where, kind="tools")
    if says_nothing(value) or (isinstance(value, str) and not value.strip()):
        return None
    if not isinstance(value, list):
        fail(where, f"{name} is {kind_of(value)}; write a list of {_TOOL}", kind="tools")
    return [_tool(tool, f"{name}[{index}]", where) for index, tool in enumerate(value)]


def _tool(tool: Any, name: str, where: str) -> dict[str, Any]:
    if isinstance(tool, dict) and "function" not in tool and isinstance(tool.get("name"), str):
        tool = {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    function = tool.get("function") if isinstance(tool, dict) else None
    if not (isinstance(function, dict) and tool.get("type") == "function"):
        fail(where, f"{name} is no function; write {_TOOL}", kind="tools")
    if not isinstance(function.get("name"), str) or not function["name"].strip():
        fail(where, f"{name} has no function.name; write {_TOOL}", kind="tools")
    return to_json(tool, name, where, kind="tools")


def to_calls(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    """The calls of a turn, each `{"type", "function": {"name", "arguments": dict}}` and the `id` that it has.

    raises   BadRow of kind `tool call`
    """
    if not isinstance(value, list):
        fail(where, f"{name} is {kind_of(value)}; write a list of {_CALL}", kind="tool call")
    return [_call(call, f"{name}[{index}]", where) for index, call in enumerate(value)]


def _call(call: Any, name: str, where: str) -> dict[str, Any]:
    if isinstance(call, dict) and "name" in call and "function" not in call:
        call = {"function": {key: call[key] for key in ("name", "arguments") if key in call}} | {
            key: value for key, value in call.items() if key not in ("name", "arguments")
        }
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") not in ("function", None):
        fail(where, f"{name} is no call of a function; write {_CALL}", kind="tool call")
    _no_other(call, ("type", "id", "function"), name, where)
    done: dict[str, Any] = {"type": "function", "function": to_function(function, f"{name}.function", where)}
    if call.get("id") is not None:
        done["id"] = to_text(call["id"], f"{name}.id", where)
    return done


def to_function(function: Any, name: str, where: str) -> dict[str, Any]:
    """A called function's name, and its arguments as an object."""
    if not isinstance(function, dict):
        fail(where, f"{name} is {kind_of(function)}; write an object with name and arguments", kind="tool call")
    if not isinstance(function.get("name"), str):
        fail(where, f"{name} has the fields {fields_of(function)}; it needs a name", kind="tool call")
    _no_other(function, ("name", "arguments"), name, where)
    arguments = _arguments(function.get("arguments"), f"{name}.arguments", where)
    return {"name": to_text(function["name"], f"{name}.name", where), "arguments": arguments}


def _arguments(value: Any, name: str, where: str) -> dict[str, Any]:
    if value is None or value == "":
        return {}
    arguments = parse_json(value, name, where, kind="tool call") if isinstance(value, str) else value
    if not isinstance(arguments, dict):
        what = f"{name} is {'JSON of ' * isinstance(value, str)}{kind_of(arguments)}; write an object"
        fail(where, f"{what}, or a string of JSON that is one", kind="tool call")
    return to_json(arguments, name, where, kind="tool call")


def _no_other(value: dict[str, Any], known: tuple[str, ...], name: str, where: str) -> None:
    other = {key: item for key, item in value.items() if key not in known and not says_nothing(item)}
    if other:
        what = f"{name} has {fields_of(other)} besides {', '.join(known)}, which is not supported; remove it"
        fail(where, what, kind="unknown key")


def open_calls(message: Message) -> list[str | None] | None:
    """Ids (None for a call without) that the turns behind an assistant's may answer; None: any number, unnamed."""
    calls = message.get("tool_calls")
    if calls is None and _WRITTEN_CALL in message["content"]:
        return None
    return [call.get("id") for call in calls or ()]


def answer_call(message: Message, calls: list[str | None] | None, name: str, where: str) -> None:
    """Take the call that a tool's turn answers out of `calls`.

    raises   BadRow of kind `tool result` where there is none
    """
    if calls is None:
        return
    if not calls:
        what = "is the result of a tool, and no call before it is unanswered; give the assistant's turn its tool_calls"
        fail(where, f"{name} {what}, or remove the row", kind="tool result")
    call_id = message.get("tool_call_id")
    if call_id is None:
        calls.pop(0)
    elif call_id in calls:
        calls.remove(call_id)
    else:
        names = ", ".join(shown(call) for call in calls if call is not None) or "none with an id"
        what = f"{name}.tool_call_id={shown(call_id)} names no unanswered call of the assistant's turn before it"
        fail(where, f"{what} ({names}); correct it", kind="tool result")
