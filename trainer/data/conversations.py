"""Turns of a file -> messages: OpenAI's `{role, content}`, ShareGPT's `{from, value}`; and what a conversation must be.

Between shapes.py, which knows where in a row the turns are, and chat.py, which gives them to a chat template. What a
turn says is either in the message or an error: a key that is passed over could change what ought to be learned. A
user's turn behind the last assistant's stays: nothing learned comes behind it, and `data.train_on=all` learns it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from trainer.data.rows import Message, Row, fail
from trainer.data.tools import answer_call, open_calls, to_calls, to_function, to_tools
from trainer.data.values import fields_of, kind_of, parse_json, says_nothing, shown, to_text

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
    if len(turn) > 2:
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


# ---- messages -> a conversation


class Aside(NamedTuple):
    """What a row has beside its turns."""

    system: str | None
    system_name: str
    """The field that it stands in."""
    tools: list[dict[str, Any]] | None


def to_aside(record: dict[str, Any], names: dict[str, str], where: str) -> Aside:
    """The system prompt and the tools of a row; `functions` is OpenAI's older word for tools.

    names    our fields -> the file's
    raises   BadRow
    """
    system, tools = record.get(names["system"]), to_tools(record.get(names["tools"]), names["tools"], where)
    if (functions := to_tools(record.get("functions"), "functions", where)) is not None:
        if tools is not None:
            fail(where, f"{names['tools']} and functions are both given; keep {names['tools']}", kind="tools")
        tools = functions
    system = None if says_nothing(system) else to_text(system, names["system"], where)
    return Aside(system, names["system"], tools)


def conversation(messages: list[Message], name: str, where: str, aside: Aside, *, prompt_len: int = 0) -> Row:
    """A row of messages whose roles follow each other as a conversation's do.

    name        what holds the turns, for errors: `messages`
    prompt_len  leading messages that are given and never learned
    raises      BadRow; see `_require_order`, and `no target` where no turn is to be learned
    """
    turns = with_system(messages, where, aside)
    num_before = len(turns) - len(messages)
    _require_order(turns, name, where, num_before=num_before)
    prompt_len += num_before * (prompt_len > 0)
    require_target(turns[prompt_len:], name, where)
    return Row(turns, None, where, prompt_len, aside.tools)


def require_target(messages: list[Message], name: str, where: str) -> None:
    """One of the messages behind the prompt is learned; else BadRow of kind `no target`."""
    if all(turn["role"] != "assistant" or turn.get("train") is False for turn in messages):
        what = f"{name} has no assistant turn that is learned, for each has train=false or weight=0"
        fail(where, f"{what}; let one be learned or remove the row", kind="no target")


def with_system(messages: list[Message], where: str, aside: Aside) -> list[Message]:
    """Messages that begin with the row's system prompt, if it has one; BadRow where they begin with another."""
    if aside.system is None:
        return messages
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": aside.system}, *messages]
    if messages[0]["content"] != aside.system:
        what = f"{aside.system_name} differs from the system turn of the conversation; keep one"
        fail(where, what, kind="system turn")
    return messages


def _require_order(messages: list[Message], name: str, where: str, *, num_before: int) -> None:
    """num_before: messages that do not stand in `name`, before those that do"""
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        what = f"{name} has no assistant turn, so there is nothing to learn; add one or remove the row"
        fail(where, what, kind="no assistant turn")
    if roles[0] == "assistant":
        what = f"{name} begins with the assistant; put a user or system turn before it"
        fail(where, what, kind="begins with the assistant")
    calls: list[str | None] | None = []
    for index, (role, message) in enumerate(zip(roles, messages, strict=True)):
        place = index - num_before
        if role == "assistant":
            if roles[index - 1] == "assistant":
                what = f"{name}[{place - 1}] and {name}[{place}] are both assistant turns"
                fail(where, f"{what}; join them or put a user turn between", kind="two assistant turns")
            calls = open_calls(message)
        elif role == "tool":
            answer_call(message, calls, f"{name}[{place}]", where)
        elif role == "system" and index:
            what = f"{name}[{place}] is a system turn; it must be the first one, as chat templates want it"
            fail(where, f"{what}: move its text there, or into a user turn", kind="system turn")
        else:
            calls = []


def answered(prompt: Any, answer: Any, names: tuple[str, str], where: str, aside: Aside) -> Row:
    """A prompt, text or messages, and the answer to it, text or messages, as one conversation.

    names    the fields of prompt and answer, for errors
    returns  a row whose `prompt_len` is the number of messages before the answer
    raises   BadRow
    """
    prompt_name, name = names
    if isinstance(prompt, list):
        turns = openai_turns(prompt, prompt_name, where)
    else:
        turns = [{"role": "user", "content": to_text(prompt, prompt_name, where)}]
    if not turns:
        fail(where, f"{prompt_name} is empty; fill it or remove the row", kind="empty")
    if not isinstance(answer, list):
        answer = [{"role": "assistant", "content": to_text(answer, name, where)}]
    elif not answer or not is_assistant(answer[0]):
        what = f"{name} does not begin with an assistant turn; give the answer alone, since {prompt_name} is given"
        fail(where, what, kind="no assistant turn")
    else:
        answer = openai_turns(answer, name, where)
    return conversation([*turns, *answer], f"{prompt_name} + {name}", where, aside, prompt_len=len(turns))


def is_assistant(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") == "assistant"
