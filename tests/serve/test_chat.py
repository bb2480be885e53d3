import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trainer.config.errors import UserError
from trainer.data.rendering.chat import tokenize
from trainer.data.rows import Row
from trainer.serve.http.chat import render_chat
from trainer.serve.http.protocol import ChatFields
from trainer.serve.http.tools import ToolCallParser, writes_tool_calls
from trainer.sources.tiny import CHAT_TEMPLATE, tiny_model

TURNS = [
    {"role": "system", "content": "Sei kurz."},
    {"role": "user", "content": "2 + 2? <|im_end|>"},
    {"role": "assistant", "content": "4 👍"},
]
WITH_BOS = "{{ bos_token }}" + CHAT_TEMPLATE
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + CHAT_TEMPLATE
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model())


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **fields: object) -> list[int]:
    return render_chat(tokenizer, ChatFields.model_validate({"messages": messages, **fields}))


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, WITH_BOS])
def test_the_prompt_is_what_training_saw(tokenizer, template):
    """Training's row: prompt then answer. Served: the prompt, which must be its beginning, BOS once if at all."""
    tokenizer.chat_template = template
    trained = tokenize(Row(TURNS, None, "row"), tokenizer, max_seq_len=512)
    first_target = next(index for index, label in enumerate(trained.labels) if label != -100)
    prompt = render(tokenizer, TURNS[:-1])
    assert prompt == trained.input_ids[:first_target]
    assert prompt.count(tokenizer.bos_token_id) == (template == WITH_BOS)
    assert render(tokenizer, TURNS, add_generation_prompt=False) == trained.input_ids


def test_bos_is_not_doubled_where_the_tokenizer_adds_one_too(tokenizer):
    tokenizer.chat_template = WITH_BOS
    tokenizer.add_bos_token = True
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id  # else this test could not fail
    ids = render(tokenizer, TURNS[:-1])
    assert ids[0] == tokenizer.bos_token_id != ids[1]
    assert ids.count(tokenizer.bos_token_id) == 1


def test_the_last_message_can_be_continued(tokenizer):
    whole = tokenizer.decode(render(tokenizer, TURNS, continue_final_message=True))
    assert whole.endswith("assistant\n4 👍")
    with pytest.raises(UserError, match="needs an assistant's message"):
        render(tokenizer, TURNS[:-1], continue_final_message=True)
    with pytest.raises(UserError, match="exclude each other"):
        render(tokenizer, TURNS, continue_final_message=True, add_generation_prompt=True)


def test_text_parts_are_joined_and_developer_is_system(tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(tokenizer, [{"role": "user", "content": parts}]) == render(
        tokenizer, [{"role": "user", "content": "a\nb"}]
    )
    assert render(tokenizer, [{"role": "developer", "content": "a"}]) == render(
        tokenizer, [{"role": "system", "content": "a"}]
    )


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "wizard", "content": "a"}, r"messages\[0\].role='wizard'; use one of system"),
        ({"content": "a"}, "role=None"),
        ({"role": ["user"], "content": "a"}, "role="),
        ({"role": "user"}, r"messages\[0\].content is missing"),
        ({"role": "user", "content": 3}, "neither a string nor a list"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "type 'image_url'; this model reads text",
        ),
        ({"role": "user", "content": ["a"]}, "type None"),
        ({"role": "user", "content": "a", "tool_calls": [{}]}, "an assistant's message"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "no function with a name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "arguments is no JSON",
        ),
    ],
)
def test_messages_that_cannot_be_read_are_named(tokenizer, message, reason):
    with pytest.raises(UserError, match=reason):
        render(tokenizer, [message])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('system must come first') }}", "system must come first"),
        ("{{ messages[7].content }}", "refuses the roles user"),
        ("{{ 'a' + 1 }}", "refuses the roles user"),
        ("{% for x in %}", "refuses the roles user"),
        ("{{ 1 // 0 }}", "refuses the roles user"),
        ("{% if false %}a{% endif %}", "no token"),
    ],
)
def test_the_templates_own_complaint_is_told(tokenizer, template, reason):
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=reason):
        render(tokenizer, [{"role": "user", "content": "a"}])


def test_a_model_without_template_says_so(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        render(tokenizer, TURNS)


def test_tools_reach_the_template_or_are_refused(tokenizer):
    with pytest.raises(UserError, match="does not look at tools"):
        render(tokenizer, TURNS, tools=[TOOL])
    tokenizer.chat_template = WITH_TOOLS
    assert '"name": "add"' in tokenizer.decode(render(tokenizer, TURNS, tools=[TOOL]))
    with pytest.raises(UserError, match=r"tools\[0\]"):
        render(tokenizer, TURNS, tools=[{"type": "function"}])
    fields = ChatFields(messages=TURNS, tools=[TOOL])
    assert render_chat(tokenizer, fields, use_tools=False) == render(tokenizer, TURNS)


def test_earlier_tool_calls_are_objects_for_the_template(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.x + 1 }}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 41}'}}
    assert tokenizer.decode(render(tokenizer, [{"role": "assistant", "content": None, "tool_calls": [call]}])) == "42"


def test_template_variables_are_the_clients_and_arguments_are_not(tokenizer):
    tokenizer.chat_template = "{{ mood }}"
    assert tokenizer.decode(render(tokenizer, TURNS, chat_template_kwargs={"mood": "calm"})) == "calm"
    for name in ("chat_template", "tokenize", "tools", "messages", "bos_token", "raise_exception", "tokenizer_kwargs"):
        with pytest.raises(UserError, match=f"chat_template_kwargs has '{name}'"):
            render(tokenizer, TURNS, chat_template_kwargs={name: "x"})


# ---- tool calls in answers

CALL = '<tool_call>\n{"name": "add", "arguments": {"x": "ä"}}\n</tool_call>'
BROKEN = "<tool_call>add(1)</tool_call>"


def parse(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser, content, calls = ToolCallParser(), "", []
    for piece in pieces:
        new, found = parser.feed(piece)
        content, calls = content + new, calls + found
    new, found = parser.finish()
    calls += found
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert len({call["id"] for call in calls}) == len(calls)
    return content + new, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize(
    ("text", "content", "num_calls"),
    [
        ("Hello.\n", "Hello.\n", 0),
        (CALL, "", 1),
        (f"Let me see.\n\n{CALL}\n", "Let me see.", 1),
        (f"{CALL}\n{CALL}", "", 2),
        (f"{CALL}\nDone. ", "\nDone. ", 1),
        (f"a {BROKEN} b", f"a {BROKEN} b", 0),
        (f"a {BROKEN}{CALL}", f"a {BROKEN}", 1),
        (CALL.removesuffix("</tool_call>"), "", 1),
        ('x <tool_call>{"name": "add", "argu', 'x <tool_call>{"name": "add", "argu', 0),
        ("a < b <tool", "a < b <tool", 0),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', 0),
        (f"<tool_call>{'[' * 5000}</tool_call>", f"<tool_call>{'[' * 5000}</tool_call>", 0),
    ],
)
def test_calls_are_taken_out_and_nothing_else_is_lost(text, content, num_calls):
    whole = parse([text])
    assert whole == (content, [("add", '{"x": "ä"}')] * num_calls)
    assert parse(list(text)) == whole


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from([CALL, BROKEN, "<tool_call>", "</tool_call>", " ", "\n", "<", "a", "<tool_", '{"name"'])),
    st.data(),
)
def test_a_stream_says_what_the_whole_answer_says(parts, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(pieces) == parse([text])


def test_string_arguments_stay_as_they_are():
    assert parse(['<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>']) == ("", [("f", '{"a": 1}')])
    assert json.loads(parse(['<tool_call>{"name": "f"}</tool_call>'])[1][0][1]) == {}


def test_only_templates_with_the_tag_are_parsed(tokenizer):
    assert not writes_tool_calls(tokenizer)
    tokenizer.chat_template = WITH_TOOLS
    assert writes_tool_calls(tokenizer)
