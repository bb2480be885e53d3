"""Turns of a file -> messages: OpenAI's `{role, content}` and ShareGPT's `{from, value}`.

Under conversations.py, which asks whether they follow each other as turns do. What a turn says is either in the message
or an error: a key that is passed over could change what ought to be learned.
"""

from collections.abc import Callable, Sequence
from typing import Any

from trainer.data.rows import Message, fail
from trainer.data.shaping.tools import to_calls, to_function
from trainer.data.shaping.values import fields_of, kind_of, parse_json, says_nothing, shown, to_text

OPENAI_ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **{"developer": "system", "function": "tool"},
}
SHAREGPT_ROLES = {
    **{"system": "system", "human": "user", "user": "user"},
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard", "chatbot", "ai", "bot"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "tool_response", "function"), "tool"),
}
_CALLS = ("function_call", "tool_call")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_ALWAYS = frozenset(("role", "content", "train", "weight"))
_KEYS = {
    "assistant": _ALWAYS | {"tool_calls", "function_call", *_REASONING},
    "tool": _ALWAYS | {"tool_call_id", "name"},
}
_SHAREGPT_KEYS = ("from", "value", "train", "weight")


def exchange(prompt: str, completion: str) -> list[Message]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


def openai_turns(value: Any, name: str, where: str) -> list[Message]:
    """A list of `{role, content}` as messages (rows.py); not yet whether they make a conversation.

    name     the row's field, for errors
    raises   BadRow
    """
    return _turns(value, name, where, openai_turn, "{role, content}")


def sharegpt_turns(value: Any, name: str, where: str) -> list[Message]:
    """A list of ShareGPT's `{from, value}` as messages; see `openai_turns`."""
    return _turns(value, name, where, sharegpt_turn, "{from, value}")


def _turns(value: Any, name: str, where: str, turn: Callable[[Any, str, str], Message], wanted: str) -> list[Message]:
    if not isinstance(value, list):
        fail(where, f"{name} is {kind_of(value)}; write a list of {wanted} objects", kind="shape")
    return [turn(item, f"{name}[{index}]", where) for index, item in enumerate(value)]


def openai_turn(turn: Any, name: str, where: str) -> Message:
    calls = _calls(turn, name, where, "role and content")
    if "role" not in turn or not ("content" in turn or calls):
        fail(where, f"{name} has the fields {fields_of(turn)}; it needs role and content", kind="shape")
    role = _role(turn["role"], OPENAI_ROLES, name, where)
    may_be_empty = role == "system" or bool(calls)
    content = _content(
        turn.get("content"), f"{name}.content", where, may_be_empty=may_be_empty, may_be_null=bool(calls)
    )
    message: Message = {"role": role, "content": content}
    if len(turn) > 2 or calls:
        _require_known(turn, _KEYS.get(role, _ALWAYS), name, where, "role and content")
        message |= _aside(turn, role, name, where) | ({"tool_calls": calls} if calls else {})
        if not _is_learned(turn, role, name, where):
            message["train"] = False
    return message


def _calls(turn: Any, name: str, where: str, wanted: str) -> list[dict[str, Any]]:
    """The calls of a turn, in either of OpenAI's ways."""
    if not isinstance(turn, dict):
        fail(where, f"{name} is {kind_of(turn)}; write an object with {wanted}", kind="shape")
    calls, call = turn.get("tool_calls"), turn.get("function_call")
    if says_nothing(call):
        return [] if says_nothing(calls) else to_calls(calls, f"{name}.tool_calls", where)
    if not says_nothing(calls):
        fail(where, f"{name} has tool_calls and function_call; keep tool_calls", kind="tool call")
    return [{"type": "function", "function": to_function(call, f"{name}.function_call", where)}]


def _role(value: Any, roles: dict[str, str], name: str, where: str) -> str:
    role = roles.get(value) if isinstance(value, str) else None
    if role is None:
        fail(where, f"{name} has the unknown role {shown(value)}; accepted: {', '.join(roles)}", kind="unknown role")
    return role


def _content(value: Any, name: str, where: str, *, may_be_empty: bool, may_be_null: bool) -> str:
    if isinstance(value, list):
        # One newline between parts, as the server joins them.
        value = "\n".join(_part(part, f"{name}[{index}]", where) for index, part in enumerate(value))
    elif value is None and may_be_null:
        return ""
    return to_text(value, name, where, may_be_empty=may_be_empty)


def _part(part: Any, name: str, where: str) -> str:
    wanted = '{"type": "text", "text": ...}'
    if not isinstance(part, dict):
        fail(where, f"{name} is {kind_of(part)}; write {wanted}, or one string", kind="content")
    if part.get("type") != "text":
        what = f"{name} has type {shown(part.get('type'))}, and only text can be trained on: {wanted}"
        fail(where, f"{what}; remove the row", kind="content")
    _require_known(part, ("type", "text"), name, where, "type and text")
    return to_text(part.get("text"), f"{name}.text", where, may_be_empty=True)


def _require_known(turn: dict[str, Any], known: Sequence[str] | frozenset[str], name: str, where: str, of: str) -> None:
    other = {key: value for key, value in turn.items() if key not in known and not says_nothing(value)}
    if other:
        what = f"{name} has {fields_of(other)} besides {of}, which is not supported; remove it"
        fail(where, what, kind="unknown key")


def _aside(turn: dict[str, Any], role: str, name: str, where: str) -> dict[str, str]:
    """What a turn has beside its content: what an assistant thought, whose result a tool's is."""
    if role == "assistant":
        said = {
            key: to_text(turn[key], f"{name}.{key}", where) for key in _REASONING if not says_nothing(turn.get(key))
        }
        if len(set(said.values())) > 1:
            fail(where, f"{name} has {' and '.join(said)}, which differ; keep one", kind="unknown key")
        return {"reasoning_content": next(iter(said.values()))} if said else {}
    keys = ("tool_call_id", "name") if role == "tool" else ()
    return {key: to_text(turn[key], f"{name}.{key}", where) for key in keys if not says_nothing(turn.get(key))}


def _is_learned(turn: dict[str, Any], role: str, name: str, where: str) -> bool:
    """Whether neither `train` nor OpenAI's `weight` says no."""
    train, weight = turn.get("train"), turn.get("weight")
    if not (train is None or isinstance(train, bool)):
        fail(where, f"{name}.train is {shown(train)}; write true or false", kind="train")
    if not (weight is None or (type(weight) in (int, float) and weight in (0, 1))):
        fail(where, f"{name}.weight is {shown(weight)}; write 0 or 1", kind="train")
    said = {bool(value) for value in (train, weight) if value is not None}
    if len(said) > 1:
        fail(where, f"{name} has train={shown(train)} and weight={shown(weight)}; keep one", kind="train")
    if True in said and role != "assistant":
        what = f"{name} is a {role} turn with {'weight=1' if train is None else 'train=true'}; only assistant turns"
        fail(where, f"{what} are learned: remove it, or learn all turns with data.train_on=all", kind="train")
    return False not in said


def sharegpt_turn(turn: Any, name: str, where: str) -> Message:
    if not isinstance(turn, dict):
        fail(where, f"{name} is {kind_of(turn)}; write an object with from and value", kind="shape")
    if not ("from" in turn and "value" in turn):
        fail(where, f"{name} has the fields {fields_of(turn)}; it needs from and value", kind="shape")
    role = _role(turn["from"], SHAREGPT_ROLES, name, where)
    content = to_text(turn["value"], f"{name}.value", where, may_be_empty=role == "system")
    message: Message = {"role": role, "content": content}
    if turn["from"] in _CALLS:
        value = parse_json(content, f"{name}.value", where, kind="tool call")
        calls = to_calls(value if isinstance(value, list) else [value], f"{name}.value", where)
        message = {"role": role, "content": "", "tool_calls": calls}
    if len(turn) > 2:
        _require_known(turn, _SHAREGPT_KEYS, name, where, "from and value")
        if not _is_learned(turn, role, name, where):
            message["train"] = False
    return message
