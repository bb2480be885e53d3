"""Messages -> a conversation that can be trained on, with what a row has beside its turns.

Between row_shapes.py, which knows where in a row the turns are, and chat.py, which gives them to a chat template. A
user's turn behind the last assistant's stays in the row: under a causal mask it changes nothing that is learned before
it, and `data.train_on=all` learns it too.
"""

from typing import Any, NamedTuple

from trainer.data.rows import Message, Row, fail
from trainer.data.shaping.messages import openai_turns
from trainer.data.shaping.tools import answer_call, open_calls, to_tools
from trainer.data.shaping.values import says_nothing, to_text, value_of


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
    system, name = value_of(record, names, "system"), names.get("system", "system")
    tools, functions = (
        to_tools(value_of(record, names, ours), names.get(ours, ours), where) for ours in ("tools", "functions")
    )
    if tools and functions:
        fail(where, f"{names['tools']} and functions are both given; keep {names['tools']}", kind="tools")
    return Aside(None if says_nothing(system) else to_text(system, name, where), name, tools or functions)


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


def exchanges(turns: list[Message], where: str, aside: Aside) -> Row:
    """A row of user and assistant turns, one after the other, which need no check."""
    return Row(with_system(turns, where, aside), None, where, tools=aside.tools)


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
        _require_given(prompt, prompt_name, where)
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


def _require_given(prompt: list[dict[str, Any]], name: str, where: str) -> None:
    """No turn of a prompt asks to be learned."""
    for index, turn in enumerate(prompt):
        if turn.get("train") or turn.get("weight"):
            what = (
                f"{name}[{index}] has {'train=true' if turn.get('train') else 'weight=1'}, and a prompt is not learned"
            )
            fail(where, f"{what}; remove it, or write one list of messages", kind="train")


def is_assistant(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") == "assistant"
