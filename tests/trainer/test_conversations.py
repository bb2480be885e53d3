"""Turns of files as messages, and what a conversation must be: each fault has its turn and its kind."""

import json
from typing import Any

import pytest

from trainer.data.rows import BadRow, Message, Row
from trainer.data.shaping.conversations import Aside, conversation
from trainer.data.shaping.messages import OPENAI_ROLES, SHAREGPT_ROLES, openai_turns, sharegpt_turns
from trainer.data.shaping.tools import to_tools
from trainer.data.shaping.values import MAX_DEPTH

NOTHING = Aside(None, "system", None)
USER, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
HUMAN, GPT = {"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}
ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
WRITTEN = {"name": "add", "arguments": '{"a": 2, "b": 2}'}
CALLING = {"role": "assistant", "content": None, "tool_calls": [{**ADD, "id": "c1"}]}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "c1"}


def openai(*turns: Any) -> list[Message]:
    return conversation(openai_turns(list(turns), "messages", "a.jsonl:1"), "messages", "a.jsonl:1", NOTHING).messages


def sharegpt(*turns: Any) -> list[Message]:
    read = sharegpt_turns(list(turns), "conversations", "a.jsonl:1")
    return conversation(read, "conversations", "a.jsonl:1", NOTHING).messages


def refused(read: Any, *turns: Any) -> tuple[str, str]:
    with pytest.raises(BadRow) as caught:
        read(*turns)
    assert str(caught.value).startswith("a.jsonl:1: ")
    return caught.value.kind, caught.value.what


# ---- OpenAI's turns


def test_plain_turns_stay_as_they_are() -> None:
    # An empty system turn is how data switches a template's default system prompt off.
    turns = [{"role": "system", "content": ""}, USER, ANSWER, USER, ANSWER]
    assert openai(*turns) == turns
    # A user's turn at the end is read by nothing that is learned, and stays.
    assert openai(USER, ANSWER, USER) == [USER, ANSWER, USER]
    assert openai(USER, {**ANSWER, "content": " \n4\0 "})[1]["content"] == " \n4\0 "  # to the letter


def test_fields_that_say_nothing_are_no_fault() -> None:
    nothing = {"tool_calls": None, "refusal": None, "audio": None, "annotations": [], "name": None, "weight": None}
    assert openai({**USER, **nothing}, {**ANSWER, **nothing}) == [USER, ANSWER]


def test_roles_of_other_ages() -> None:
    called = {"role": "assistant", "content": None, "function_call": WRITTEN}
    result = {"role": "function", "name": "add", "content": "4"}
    assert openai({"role": "developer", "content": "Add."}, USER, called, result, ANSWER) == [
        {"role": "system", "content": "Add."},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [ADD]},
        {"role": "tool", "content": "4", "name": "add"},
        ANSWER,
    ]


def test_text_parts_are_joined_as_the_server_joins_them() -> None:
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?", "image_url": None}]
    assert openai({**USER, "content": parts}, ANSWER)[0]["content"] == "2 + \n2?"


def test_calls_and_results() -> None:
    done = openai(USER, CALLING, RESULT, ANSWER)
    assert done == [USER, {"role": "assistant", "content": "", "tool_calls": [{**ADD, "id": "c1"}]}, RESULT, ANSWER]
    assert openai(USER, {**CALLING, "content": "I add."})[1]["content"] == "I add."
    without_content = {key: value for key, value in CALLING.items() if key != "content"}
    assert openai(USER, without_content) == done[:2]  # a call may be all there is to learn


@pytest.mark.parametrize("arguments", [{"a": 2, "b": 2}, '{"a": 2, "b": 2}'])
@pytest.mark.parametrize(
    "wrap", [lambda f: {"type": "function", "function": f}, lambda f: {"function": f}, lambda f: f]
)
def test_arguments_become_an_object(arguments: Any, wrap: Any) -> None:
    call = wrap({"name": "add", "arguments": arguments})
    assert openai(USER, {**CALLING, "tool_calls": [call]})[1]["tool_calls"] == [ADD]


@pytest.mark.parametrize("arguments", [None, "", {}, "{}"])
def test_a_call_may_have_no_arguments(arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": arguments}}
    assert openai(USER, {**CALLING, "tool_calls": [call]})[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_results_answer_the_calls_before_them() -> None:
    two = {**CALLING, "tool_calls": [{**ADD, "id": "c1"}, {**ADD, "id": "c2"}]}
    other = {**RESULT, "tool_call_id": "c2"}
    assert len(openai(USER, two, other, RESULT, ANSWER)) == 5  # in any order
    unnamed = {"role": "tool", "content": "4"}
    assert len(openai(USER, two, unnamed, unnamed, ANSWER)) == 5
    assert refused(openai, USER, two, unnamed, unnamed, unnamed, ANSWER)[0] == "tool result"
    # Hermes' rows write calls into the text, where they cannot be counted.
    hermes = {"role": "assistant", "content": '<tool_call>\n{"name": "add"}\n</tool_call>'}
    assert len(openai(USER, hermes, unnamed, unnamed, ANSWER)) == 5


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_what_an_assistant_thought(key: str) -> None:
    assert openai(USER, {**ANSWER, key: "2 and 2"})[1] == {**ANSWER, "reasoning_content": "2 and 2"}
    both = {**ANSWER, key: "2 and 2", "reasoning": "2 and 2"}
    assert openai(USER, both)[1]["reasoning_content"] == "2 and 2"


@pytest.mark.parametrize(
    ("keys", "is_learned"),
    [
        *(({"train": True}, True), ({"weight": 1}, True), ({"weight": 1.0, "train": True}, True)),
        *(({"train": False}, False), ({"weight": 0}, False), ({"weight": 0, "train": False}, False)),
    ],
)
def test_turns_that_are_read_and_not_learned(keys: dict[str, Any], is_learned: bool) -> None:
    turn = {**ANSWER} if is_learned else {**ANSWER, "train": False}
    assert openai(USER, {**ANSWER, **keys}, USER, ANSWER)[1] == turn
    assert sharegpt(HUMAN, {**GPT, **keys}, HUMAN, GPT)[1] == turn


@pytest.mark.parametrize(
    ("turns", "kind", "message"),
    [
        ([], "no assistant turn", "messages has no assistant turn, so there is nothing to learn"),
        ([USER], "no assistant turn", "messages has no assistant turn"),
        ([ANSWER], "begins with the assistant", "messages begins with the assistant"),
        ([USER, ANSWER, ANSWER], "two assistant turns", "messages[1] and messages[2] are both assistant turns"),
        ([USER, "4"], "shape", "messages[1] is a string; write an object with role and content"),
        ([USER, None], "shape", "messages[1] is null; write an object"),
        ([HUMAN], "shape", "messages[0] has the fields from, value; it needs role and content"),
        ([{"role": "user"}], "shape", "messages[0] has the fields role; it needs role and content"),
        ([USER, {"role": "gpt", "content": "4"}], "unknown role", "unknown role 'gpt'; accepted: system, user, assis"),
        ([USER, {"role": ["user"], "content": "4"}], "unknown role", "messages[1] has the unknown role ['user']"),
        ([USER, {"role": None, "content": "4"}], "unknown role", "messages[1] has the unknown role None"),
        ([USER, {**ANSWER, "content": None}], "type", "messages[1].content is null; write a string"),
        ([USER, {**ANSWER, "content": {"a": 1}}], "type", "messages[1].content is an object; write a string"),
        ([USER, {**ANSWER, "content": ""}], "empty", "messages[1].content is empty"),
        ([{**USER, "content": " \n"}, ANSWER], "empty", "messages[0].content is empty"),
        ([{**USER, "content": []}, ANSWER], "empty", "messages[0].content is empty"),
        ([{**USER, "content": "\ud83d"}, ANSWER], "surrogate", "messages[0].content has half of a surrogate pair"),
        ([{**USER, "content": ["a"]}], "content", "messages[0].content[0] is a string; write"),
        ([{**USER, "content": [{"type": "text"}]}], "type", "messages[0].content[0].text is null; write a string"),
        (
            [{**USER, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "content",
            "messages[0].content[0] has type 'image_url', and only text can be trained on",
        ),
        ([{**USER, "content": [{"type": "text", "text": "a", "b": 1}]}], "unknown key", "content[0] has b besides"),
        ([USER, ANSWER, {"role": "system", "content": "a"}], "system turn", "messages[2] is a system turn; it must be"),
        ([USER, {**ANSWER, "name": "Bo"}], "unknown key", "messages[1] has name besides role and content"),
        ([{**USER, "tool_calls": [ADD]}, ANSWER], "unknown key", "messages[0] has tool_calls besides role and content"),
        (
            [USER, {**ANSWER, "refusal": "no", "audio": {"id": 1}}],
            "unknown key",
            "messages[1] has refusal, audio besides",
        ),
        ([USER, {**ANSWER, "prefix": False}], "unknown key", "messages[1] has prefix besides role and content"),
        ([{**USER, "reasoning": "hm"}, ANSWER], "unknown key", "messages[0] has reasoning besides"),
        ([USER, {**ANSWER, "reasoning": "a", "thinking": "b"}], "unknown key", "reasoning and thinking, which differ"),
        ([USER, {**ANSWER, "thinking": ["a"]}], "type", "messages[1].thinking is a list; write a string"),
        ([USER, {**ANSWER, "train": 0}], "train", "messages[1].train is 0; write true or false"),
        ([USER, {**ANSWER, "weight": 0.5}], "train", "messages[1].weight is 0.5; write 0 or 1"),
        ([USER, {**ANSWER, "weight": True}], "train", "messages[1].weight is True; write 0 or 1"),
        (
            [USER, {**ANSWER, "weight": 1, "train": False}],
            "train",
            "messages[1] has train=False and weight=1; keep one",
        ),
        ([{**USER, "train": True}, ANSWER], "train", "messages[0] is a user turn with train=true; only assistant"),
        ([{**USER, "weight": 1}, ANSWER], "train", "messages[0] is a user turn with weight=1; only assistant"),
        ([USER, {**ANSWER, "train": False}], "no target", "messages has no assistant turn that is learned"),
        ([RESULT, ANSWER], "tool result", "messages[0] is the result of a tool, and no call before it is unanswered"),
        ([USER, ANSWER, RESULT], "tool result", "messages[2] is the result of a tool"),
        ([USER, CALLING, USER, RESULT], "tool result", "messages[3] is the result of a tool"),
        ([USER, CALLING, RESULT, RESULT], "tool result", "messages[3] is the result of a tool"),
        (
            [USER, CALLING, {**RESULT, "tool_call_id": "c2"}],
            "tool result",
            "messages[2].tool_call_id='c2' names no unanswered call of the assistant's turn before it ('c1')",
        ),
        ([USER, CALLING, {**RESULT, "tool_call_id": 1}], "type", "messages[2].tool_call_id is a number"),
        ([USER, CALLING, {**RESULT, "content": ""}], "empty", "messages[2].content is empty"),
    ],
)
def test_a_faulty_conversation(turns: list[Any], kind: str, message: str) -> None:
    found, what = refused(openai, *turns)
    assert found == kind and message in what


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tool_calls": {}, "function_call": 3}, "messages[1].function_call is a number; write an object with name"),
        ({"tool_calls": 3}, "messages[1].tool_calls is a number; write a list of"),
        ({"tool_calls": [3]}, "messages[1].tool_calls[0] is no call of a function"),
        (
            {"tool_calls": [{"type": "custom", "function": WRITTEN}]},
            "messages[1].tool_calls[0] is no call of a function",
        ),
        (
            {"tool_calls": [{"function": {}}]},
            "messages[1].tool_calls[0].function has the fields (none); it needs a name",
        ),
        ({"function_call": {"name": 3}}, "messages[1].function_call has the fields name; it needs a name"),
        ({"tool_calls": [ADD], "function_call": WRITTEN}, "messages[1] has tool_calls and function_call"),
        ({"function_call": {"name": "f", "arguments": "a=1"}}, "messages[1].function_call.arguments is no JSON: 'a=1'"),
        ({"function_call": {"name": "f", "arguments": "[1]"}}, "arguments is JSON of a list; write an object"),
        ({"function_call": {"name": "f", "arguments": [1]}}, "arguments is a list; write an object"),
        ({"function_call": {"name": "f", "arguments": '{"a": NaN}'}}, "arguments holds nan, which is no JSON"),
        ({"function_call": {"name": "f", "arguments": "[" * 9999}}, "messages[1].function_call.arguments is no JSON"),
        ({"function_call": {"name": "f", "arguments": '{"a": ' + "9" * 9999 + "}"}}, "arguments is no JSON"),
    ],
)
def test_a_faulty_call(keys: dict[str, Any], message: str) -> None:
    kind, what = refused(openai, USER, {**CALLING, "tool_calls": None, **keys})
    assert kind == "tool call" and message in what and len(what) < 400


def test_calls_say_nothing_else() -> None:
    call = {**ADD, "index": 0}
    assert refused(openai, USER, {**CALLING, "tool_calls": [call]}) == (
        "unknown key",
        "messages[1].tool_calls[0] has index besides type, id, function, which is not supported; remove it",
    )


# ---- ShareGPT's turns


def test_sharegpt() -> None:
    asked = {"from": "function_call", "value": json.dumps(WRITTEN)}
    both = {"from": "function_call", "value": json.dumps([WRITTEN, WRITTEN])}
    result = {"from": "observation", "value": "4"}
    assert sharegpt({"from": "system", "value": ""}, HUMAN, asked, result, GPT) == [
        {"role": "system", "content": ""},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [ADD]},
        {"role": "tool", "content": "4"},
        ANSWER,
    ]
    assert sharegpt(HUMAN, both, result, result, GPT)[1]["tool_calls"] == [ADD, ADD]


@pytest.mark.parametrize("role", SHAREGPT_ROLES)
def test_every_role_of_sharegpt_is_one_of_ours(role: str) -> None:
    value = json.dumps(WRITTEN)  # any turn may hold it
    turns = sharegpt_turns([{"from": role, "value": value}], "conversations", "a.jsonl:1")
    assert turns[0]["role"] == SHAREGPT_ROLES[role]
    assert set(SHAREGPT_ROLES.values()) == set(OPENAI_ROLES.values()) == {"system", "user", "assistant", "tool"}


@pytest.mark.parametrize(
    ("turns", "kind", "message"),
    [
        ([HUMAN, "4"], "shape", "conversations[1] is a string; write an object with from and value"),
        ([USER, ANSWER], "shape", "conversations[0] has the fields role, content; it needs from and value"),
        (
            [HUMAN, {**GPT, "from": "alice"}],
            "unknown role",
            "conversations[1] has the unknown role 'alice'; accepted: sy",
        ),
        ([HUMAN, {**GPT, "value": None}], "type", "conversations[1].value is null; write a string"),
        ([HUMAN, {**GPT, "value": ""}], "empty", "conversations[1].value is empty"),
        ([HUMAN, {**GPT, "loss": 0}], "unknown key", "conversations[1] has loss besides from and value"),
        ([HUMAN, {"from": "function_call", "value": "add(2)"}], "tool call", "conversations[1].value is no JSON"),
        ([HUMAN, {"from": "function_call", "value": "3"}], "tool call", "conversations[1].value[0] is no call"),
        ([HUMAN, {**GPT, "weight": 0}], "no target", "conversations has no assistant turn that is learned"),
        ([GPT], "begins with the assistant", "conversations begins with the assistant"),
        ([{**HUMAN, "train": True}, GPT], "train", "conversations[0] is a user turn with train=true"),
    ],
)
def test_a_faulty_sharegpt_conversation(turns: list[Any], kind: str, message: str) -> None:
    found, what = refused(sharegpt, *turns)
    assert found == kind and message in what


# ---- tools

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}


@pytest.mark.parametrize("value", [[TOOL], [TOOL["function"]], [{**TOOL["function"], "type": "function"}]])
def test_tools_are_as_openais_api_takes_them(value: list[dict[str, Any]]) -> None:
    assert to_tools(value, "tools", "a.jsonl:1") == to_tools(json.dumps(value), "tools", "a.jsonl:1") == [TOOL]


def test_a_tool_stays_as_it_is() -> None:
    named = {**TOOL, "name": "other", "cache_control": None}
    assert to_tools([named], "tools", "a.jsonl:1") == [named]


@pytest.mark.parametrize("value", [None, "", " ", [], {}, "[]", "null"])
def test_no_tools(value: Any) -> None:
    assert to_tools(value, "tools", "a.jsonl:1") is None


def nested(depth: int) -> Any:
    return {} if depth == 0 else {"a": nested(depth - 1)}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (TOOL, "tools is an object; write a list of"),
        ("add", "tools is no JSON: 'add'"),
        ("{}{", "tools is no JSON"),
        ([3], "tools[0] is no function"),
        ([TOOL, {"type": "function"}], "tools[1] is no function"),
        ([{"function": {"name": "f"}}], "tools[0] is no function"),
        ([{**TOOL, "type": "code"}], "tools[0] is no function"),
        ([{"type": "function", "function": {"name": 3}}], "tools[0] has no function.name"),
        ([{"type": "function", "function": {"name": " "}}], "tools[0] has no function.name"),
        ([{"name": "f", "parameters": {"default": float("inf")}}], "tools[0] holds inf, which is no JSON"),
        ([{"name": "f", "parameters": {"default": b"x"}}], "tools[0] holds a value of type bytes"),
        ([{"name": "f", "parameters": nested(MAX_DEPTH)}], f"tools[0] is nested deeper than {MAX_DEPTH} levels"),
    ],
)
def test_faulty_tools(value: Any, message: str) -> None:
    with pytest.raises(BadRow) as caught:
        to_tools(value, "tools", "a.jsonl:1")
    assert message in caught.value.what and caught.value.kind == "tools" and caught.value.where == "a.jsonl:1"


def test_strings_within_tools_can_be_tokenized() -> None:
    for tool in ({"name": "f", "description": "\udc80"}, {"name": "f", "parameters": {"\udc80": 1}}):
        with pytest.raises(BadRow, match=r"tools\[0\] has half of a surrogate pair"):
            to_tools([tool], "tools", "a.jsonl:1")


def test_tools_travel_with_the_conversation() -> None:
    row = conversation([USER, ANSWER], "messages", "a.jsonl:1", Aside("Add.", "system", [TOOL]), prompt_len=1)
    assert row == Row([{"role": "system", "content": "Add."}, USER, ANSWER], None, "a.jsonl:1", 2, [TOOL])
