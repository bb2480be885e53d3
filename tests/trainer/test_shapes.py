"""Which shape a source has, and its rows: nothing is guessed, dropped in silence, or answered without its field."""

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.data import ColumnsConfig, DataSource, RowFormat, SourceConfig
from trainer.config.errors import UserError
from trainer.config.preference import Method
from trainer.data.rows import BadRow, Example, Pair, Row, content_hash
from trainer.data.shaping.shapes import Shaper, make_shaper

DATA = Path(__file__).parents[3] / "shared" / "data"
USER, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
HUMAN, GPT = {"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
GOOD = {"prompt": "2 + 2?", "completion": "4"}
ALPACA = {"instruction": "2 + 2?", "input": "", "output": "4"}


def shaper(
    first: dict[str, Any], *, format: RowFormat = RowFormat.auto, method: Method = Method.none, **columns: str
) -> Shaper:
    source = SourceConfig(source=DataSource.pydocs, format=format, columns=ColumnsConfig(**columns))
    return make_shaper(first, "a.jsonl:1", source, method)


def row(record: dict[str, Any], **keys: Any) -> Example:
    return shaper(record, **keys).row(record, "a.jsonl:1")


def said(record: dict[str, Any], **keys: Any) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"]) for turn in row(record, **keys).messages]


def refused(record: dict[str, Any], **keys: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        row(record, **keys)
    return caught.value


# ---- each shape


@pytest.mark.parametrize(
    ("record", "description"),
    [
        ({"messages": [USER, ANSWER], "id": 7}, "messages"),
        ({"conversations": [USER, ANSWER]}, "messages (conversations -> messages)"),
        ({"conversations": [HUMAN, GPT]}, "sharegpt (conversations -> messages)"),
        ({"messages": [HUMAN, GPT]}, "sharegpt"),
        ({"conversations": None, "messages": [HUMAN, GPT]}, "sharegpt"),
        (GOOD, "prompt/completion"),
        ({**GOOD, "messages": None, "text": None}, "prompt/completion"),  # a table has every column in each row
        (ALPACA, "alpaca"),
        ({"prompt": [USER], "completion": [ANSWER]}, "prompt/completion"),
        ({"prompt": "2 + 2?", "completion": [ANSWER]}, "prompt/completion"),
    ],
)
def test_shapes_of_a_conversation(record: dict[str, Any], description: str) -> None:
    made = shaper(record)
    assert made.description == description
    assert made.row(record, "a.jsonl:1").messages == [USER, ANSWER]
    assert made.row(record, "b.jsonl:9").origin == "b.jsonl:9"


def test_text_and_tokens() -> None:
    assert row({"text": "Once.\0"}) == Row(None, "Once.\0", "a.jsonl:1")
    assert row({"input_ids": [5, 6]}) == Row(None, None, "a.jsonl:1", tokens=([5, 6], [5, 6]))
    made = row({"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "attention_mask": [1, 1, 1]})
    assert made.tokens == ([5, 6, 7], [-100, 6, 7])
    ids, labels = row({"input_ids": [5, 6]}).tokens
    assert ids is not labels  # the first label is masked later, and the id must not be


def test_a_shaper_travels_to_other_processes() -> None:
    for record in (GOOD, {"messages": [USER, ANSWER]}, {"input_ids": [1]}):
        made = pickle.loads(pickle.dumps(shaper(record)))
        assert made == shaper(record) and made.row(record, "x:1") == shaper(record).row(record, "x:1")


def test_alpaca() -> None:
    assert said({**ALPACA, "input": "about\n"}) == [("user", "2 + 2?\n\nabout\n"), ("assistant", "4")]
    for empty in (None, "", " "):
        assert said({**ALPACA, "input": empty}) == [("user", "2 + 2?"), ("assistant", "4")]
    full = {**ALPACA, "system": "Be brief.", "history": [["1 + 1?", "2"]]}
    assert shaper(full).description == "alpaca with system, history"
    roles_and_texts = [("system", "Be brief."), ("user", "1 + 1?"), ("assistant", "2"), ("user", "2 + 2?")]
    assert said(full) == [*roles_and_texts, ("assistant", "4")]
    dolly = {"instruction": "2 + 2?", "context": "sums", "response": "4"}
    assert said(dolly, input="context", output="response")[0] == ("user", "2 + 2?\n\nsums")


def test_what_is_given_counts_as_the_prompt() -> None:
    """TRL's conversational prompt and completion: the prompt's assistant turns are not learned."""
    prompt = [USER, ANSWER, {"role": "user", "content": "3 + 3?"}]
    made = row({"prompt": prompt, "completion": [{"role": "assistant", "content": "6"}], "system": "Be brief."})
    assert made.prompt_len == 4 and [turn["role"] for turn in made.messages[:2]] == ["system", "user"]
    weighted = {"prompt": [USER, {**ANSWER, "weight": 1}, USER], "completion": [ANSWER]}
    assert "prompt[1] has weight=1, and a prompt is not learned" in str(refused(weighted))


@pytest.mark.parametrize("record", [{"messages": [USER, ANSWER]}, {"conversations": [HUMAN, GPT]}, GOOD, ALPACA])
def test_system_and_tools_beside_turns(record: dict[str, Any]) -> None:
    made = row({**record, "system": "Be brief.", "tools": json.dumps([TOOL])})
    assert made.messages == [SYSTEM, USER, ANSWER] and made.tools == [TOOL]
    made = row({**record, "persona": "Be brief.", "can": [TOOL["function"]]}, system="persona", tools="can")
    assert made.messages == [SYSTEM, USER, ANSWER] and made.tools == [TOOL]
    for nothing in (None, "", []):
        made = row({**record, "system": nothing, "tools": nothing})
        assert made.messages == [USER, ANSWER] and made.tools is None


def test_functions_are_an_older_word_for_tools() -> None:
    record = {"messages": [USER, ANSWER], "functions": [TOOL["function"]], "parallel_tool_calls": False}
    assert row(record).tools == [TOOL] and shaper(record).description == "messages with functions"
    assert "tools and functions are both given" in str(refused({**record, "tools": [TOOL]}))


def test_the_system_prompt_stands_once() -> None:
    record = {"messages": [SYSTEM, USER, ANSWER], "system": "Be brief."}
    assert row(record).messages == [SYSTEM, USER, ANSWER]
    error = refused({**record, "system": "Be long."})
    assert error.kind == "system turn" and "system differs from the system turn" in str(error)


def test_places_are_the_files_own() -> None:
    """A system prompt from its own field does not shift the numbers of turns."""
    error = refused({"messages": [USER, ANSWER, ANSWER], "system": "Be brief."})
    assert "messages[1] and messages[2] are both assistant turns" in str(error)


# ---- columns and formats


def test_columns_rename_and_choose_the_shape() -> None:
    record = {"text": "ignored", "question": "2 + 2?", "answer": "4"}
    made = shaper(record, prompt="question", completion="answer")
    assert made.description == "prompt/completion (question -> prompt, answer -> completion)"
    assert made.row(record, "x:1").messages == [USER, ANSWER]
    assert shaper({"chat": [HUMAN, GPT]}, messages="chat").description == "sharegpt (chat -> messages)"
    tokens = shaper({"ids": [1, 2], "targets": [-100, 2]}, input_ids="ids", labels="targets")
    assert tokens.description == "tokens with labels (ids -> input_ids, targets -> labels)"


def test_a_named_field_is_read_once() -> None:
    """Fields that are read by their own names too are not, where a column says that they are something else."""
    assert said({"input": "2 + 2?", "output": "4"}, instruction="input") == [("user", "2 + 2?"), ("assistant", "4")]
    assert row({"system": "2 + 2?", "tools": "4"}, prompt="system", completion="tools").messages == [USER, ANSWER]
    assert row({"messages": [USER, ANSWER], "prompt": "Be brief."}, system="prompt").messages[0] == SYSTEM
    assert row({"input_ids": [1, 2], "labels": [9, 9]}, input_ids="labels").tokens == ([9, 9], [9, 9])


def test_a_format_chooses_where_a_row_could_be_several() -> None:
    record = {"messages": [USER, ANSWER], "text": "Once.", **GOOD}
    assert row(record, format=RowFormat.text).text == "Once."
    assert shaper(record, format=RowFormat.prompt_completion).description == "prompt/completion"
    assert shaper(record, format=RowFormat.messages).description == "messages"
    assert row({"conversations": [HUMAN, GPT]}, format=RowFormat.sharegpt).messages == [USER, ANSWER]


@pytest.mark.parametrize(
    ("record", "keys", "message"),
    [
        ({"q": "a"}, {"prompt": "q", "text": "t"}, "data.columns.prompt=q and data.columns.text=t name different"),
        ({"q": "a"}, {"prompt": "q", "input": "t"}, "data.columns.prompt=q and data.columns.input=t name different"),
        (GOOD, {"system": "sys"}, "a.jsonl:1: data.columns.system=sys is not among the fields prompt, completion;"),
        (ALPACA, {"input": "inptu"}, "data.columns.input=inptu is not among the fields instruction, input, output"),
        (GOOD, {"chosen": "prompt"}, "data.columns.chosen=prompt has no effect with preference.method=none"),
        (GOOD, {"label": "ok"}, "set preference.method=kto"),
        (
            {"text": "a", "s": "b"},
            {"format": RowFormat.text, "system": "s"},
            "data.columns.system=s has no effect with data.format=text, whose rows have text; leave it out",
        ),
        (
            {"instruction": "a"},
            {"format": RowFormat.alpaca},
            "a.jsonl:1: found the fields instruction, but data.format=alpaca needs instruction and output; name the "
            "file's fields with data.columns.output",
        ),
        ({"text": "a"}, {"format": RowFormat.sharegpt}, "data.format=sharegpt needs messages; name"),
        (
            {"messages": [USER, ANSWER], "conversations": [HUMAN, GPT]},
            {},
            "a.jsonl:1: found the fields messages and conversations, and both may be the conversation",
        ),
        ({"question": "a", "answer": "b"}, {}, "a.jsonl:1: found the fields question, answer, but a row needs"),
        ({"question": "a"}, {}, "data.columns.prompt and data.columns.completion"),
        (
            {"question": "a", "answer": "b"},
            {"prompt": "question", "completion": "reply"},
            "found the fields question, answer, but a row needs question and reply;",
        ),
        ({"chosen": "a", "rejected": "b"}, {}, "chosen and rejected are read with preference.method=dpo or orpo"),
        ({}, {}, "found the fields (none), but a row needs"),
        (GOOD, {"prompt": "completion"}, "data.columns.prompt and data.columns.completion are both completion; name"),
        (GOOD, {"prompt": "prompt", "completion": "prompt"}, "are both prompt; name the file's field of each"),
        (ALPACA, {"input": "output"}, "data.columns.output and data.columns.input are both output"),
        ({**GOOD, "label": False}, {}, "a.jsonl:1: prompt and completion stand beside label=false"),
    ],
)
def test_settings_that_do_not_fit(record: dict[str, Any], keys: dict[str, Any], message: str) -> None:
    assert message in str(refused(record, **keys))


@pytest.mark.parametrize(
    ("record", "ways"),
    [
        ({"messages": [USER, ANSWER], "text": "Once."}, "messages (messages), or as text (text)"),
        ({"messages": [USER, ANSWER], "prompt": "3?"}, "messages (messages), or as prompt/completion (prompt)"),
        ({**GOOD, "text": "Once."}, "prompt/completion (prompt, completion), or as text (text)"),
        ({**ALPACA, "input": "sums", "text": "2 + 2? 4"}, "alpaca (instruction, output), or as text (text)"),
        ({"text": "Once.", "input_ids": [1, 2]}, "text (text), or as tokens (input_ids)"),
        ({"text": "Q", "output": "A"}, "text (text), or as alpaca (output)"),
    ],
)
def test_a_row_that_could_be_several_is_an_error(record: dict[str, Any], ways: str) -> None:
    error = refused(record)
    assert f"a.jsonl:1: could be read as {ways}, which differ; choose with data.format=" in str(error)
    assert not isinstance(error, BadRow)  # a setting is to be made: no other row could decide


@pytest.mark.parametrize(
    ("record", "shape"),
    [
        ({**ALPACA, "text": "### Task:\n2 + 2?\n### Answer:\n4"}, "alpaca"),  # as tatsu-lab/alpaca has it
        ({"messages": [USER, ANSWER], "prompt": "2 + 2?"}, "messages"),  # as UltraChat has it
        ({"messages": [USER, ANSWER], "text": "<user>2 + 2?<assistant>4"}, "messages"),
        ({**GOOD, "text": "2 + 2?\n4"}, "prompt/completion"),
    ],
)
def test_a_rendering_of_the_fields_is_no_other_reading(record: dict[str, Any], shape: str) -> None:
    assert shaper(record).description == shape
    assert row(record).messages == [USER, ANSWER]


# ---- rows that cannot be used


@pytest.mark.parametrize(
    ("first", "record", "kind", "message"),
    [
        (
            GOOD,
            {"text": "x"},
            "shape",
            "no prompt and no completion among the fields text, but the file's first row is",
        ),
        (GOOD, {"prompt": "a"}, "shape", "no completion among the fields prompt"),
        (GOOD, {}, "shape", "no prompt and no completion among the fields (none)"),
        (GOOD, {**GOOD, "completion": None}, "type", "completion is null; write a string"),
        (GOOD, {**GOOD, "prompt": 5}, "type", "prompt is a number; write a string"),
        (GOOD, {**GOOD, "completion": ["b"]}, "no assistant turn", "completion does not begin with an assistant turn"),
        (GOOD, {**GOOD, "completion": [USER]}, "no assistant turn", "completion does not begin with an assistant turn"),
        (GOOD, {**GOOD, "prompt": []}, "empty", "prompt is empty"),
        (GOOD, {**GOOD, "completion": " \n"}, "empty", "completion is empty; fill it or remove"),
        (GOOD, {**GOOD, "prompt": "\ud83d"}, "surrogate", "prompt has half of a surrogate pair"),
        (GOOD, {**GOOD, "system": 3}, "type", "system is a number; write a string"),
        (GOOD, {**GOOD, "tools": [3]}, "tools", "tools[0] is no function"),
        ({"messages": [USER, ANSWER]}, {"conversations": [HUMAN, GPT]}, "shape", "no messages among the fields conv"),
        ({"messages": [USER, ANSWER]}, {"messages": [HUMAN, GPT]}, "shape", "messages[0] has the fields from, value; "),
        ({"messages": [HUMAN, GPT]}, {"messages": [USER, ANSWER]}, "shape", "it needs from and value"),
        (ALPACA, {**ALPACA, "output": ""}, "empty", "output is empty"),
        (ALPACA, {**ALPACA, "input": ["a"]}, "type", "input is a list; write a string"),
        (ALPACA, {**ALPACA, "history": [["a"]]}, "type", "history[0] is no [user, assistant] pair"),
        (ALPACA, {**ALPACA, "history": "a"}, "type", "history is a string; write a list"),
        (ALPACA, {**ALPACA, "history": [["a", ""]]}, "empty", "history[0][1] is empty"),
        ({"text": "a"}, {"text": "\n"}, "empty", "text is empty"),
    ],
)
def test_a_faulty_row(first: dict[str, Any], record: dict[str, Any], kind: str, message: str) -> None:
    with pytest.raises(BadRow) as caught:
        shaper(first).row(record, "a.jsonl:2")
    assert str(caught.value).startswith("a.jsonl:2: ") and message in str(caught.value)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"input_ids": []}, "empty", "input_ids is empty"),
        ({"input_ids": "1 2"}, "type", "input_ids is a string; write a list of integers"),
        ({"input_ids": [1, True]}, "type", "input_ids[1] is True; write a list of integers"),
        ({"input_ids": [1, 2.0]}, "type", "input_ids[1] is 2.0"),
        ({"input_ids": [1, -1]}, "tokens", "input_ids has -1, which is no token id"),
        ({"input_ids": [1, 2**31]}, "tokens", "input_ids has 2147483648"),
        ({"input_ids": [1, 2], "labels": [2]}, "tokens", "labels has 1 entries and input_ids 2"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "tokens", "labels[0] is 2; write -100, or the token's own id (1)"),
        ({"input_ids": [0, 2], "labels": [-100, -1]}, "tokens", "labels[1] is -1"),
        ({"input_ids": [1, 2], "labels": [-100, None]}, "type", "labels[1] is None"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "no target", "labels has no target"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "tokens", "attention_mask is not 2 ones"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "tokens", "attention_mask is not 2 ones"),
    ],
)
def test_faulty_tokens(fields: dict[str, Any], kind: str, message: str) -> None:
    error = refused(fields)
    assert isinstance(error, BadRow) and error.kind == kind and message in str(error)


@pytest.mark.parametrize("value", ["hello", [], ["4"], [{"text": "a"}], 3])
def test_a_first_row_without_turns_does_not_decide(value: Any) -> None:
    """BadRow, so that where bad rows are skipped the next one decides between OpenAI's turns and ShareGPT's."""
    with pytest.raises(BadRow, match=r"a\.jsonl:1: conversations"):
        shaper({"conversations": value})


def test_errors_are_short_and_printable() -> None:
    record = {"\ud83d\n": 1, **{f"field{i}" * 99: i for i in range(99)}}
    text = str(refused(record))
    assert text.isprintable() and "and 80 more" in text and len(text) < 2500
    text = str(refused({"messages": [{"role": "x" * 10_000, "content": "a"}]}))
    assert len(text) < 300


# ---- any JSON value in any field

WORDS = st.sampled_from(
    ["", " ", "a", "{}", "[]", '{"name": "f"}', "\ud83d", "\0", "é", "system", "user", "assistant", "tool", "function"]
    + ["text", "gpt", "human", "function_call", "observation", "c1"]
)
KEYS = st.sampled_from(
    ["role", "content", "from", "value", "train", "weight", "tool_calls", "function_call", "tool_call_id", "name", "id"]
    + ["type", "text", "function", "arguments", "parameters", "reasoning", "thinking", "refusal", "audio", "other"]
)
SCALARS = st.none() | st.booleans() | st.integers(-101, 9) | st.just(2**70) | st.floats() | WORDS
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)
DEEP: Any = []
for _ in range(600):
    DEEP = [DEEP]
WHOLE = [
    (Method.none, {"messages": [SYSTEM, USER, {**ANSWER, "tool_calls": [CALL]}, {**USER, "role": "tool"}, ANSWER]}),
    (Method.none, {"messages": [USER, ANSWER], "tools": [TOOL], "functions": None, "system": "a"}),
    (Method.none, {"conversations": [HUMAN, GPT, HUMAN, GPT], "tools": None, "system": "a"}),
    (Method.none, {**ALPACA, "system": "a", "history": [["a", "b"]], "tools": "[]"}),
    (Method.none, {**GOOD, "system": "a"}),
    (Method.none, {"prompt": [USER], "completion": [ANSWER]}),
    (Method.none, {"text": "a"}),
    (Method.none, {"input_ids": [1, 2], "labels": [1, -100], "attention_mask": [1, 1]}),
    (Method.dpo, {"prompt": "a", "chosen": "b", "rejected": "c", "system": "", "tools": None}),
    (Method.orpo, {"prompt": None, "chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "5"}]}),
    (Method.orpo, {"chosen": "b1", "rejected": "b2"}),
    (Method.kto, {**GOOD, "label": True}),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values within one."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in [(*path, key), *places(item, (*path, key))]]


def get(value: Any, path: tuple[Any, ...]) -> Any:
    return get(value[path[0]], path[1:]) if path else value


def put(value: Any, path: tuple[Any, ...], item: Any) -> Any:
    if not path:
        return item
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(copy[path[0]], path[1:], item)
    return copy


def is_usable(example: Example) -> bool:
    rows = [example.chosen, example.rejected] if isinstance(example, Pair) else [getattr(example, "row", example)]
    texts = json.dumps([row.says() for row in rows], ensure_ascii=False, allow_nan=False)
    learned = [
        row.tokens or row.text or [turn for turn in row.messages[row.prompt_len :] if turn["role"] == "assistant"]
        for row in rows
    ]
    return bool(texts.encode()) and all(learned) and bool(content_hash(example))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_value_anywhere_is_a_row_or_a_bad_row(data: st.DataObject) -> None:
    method, whole = data.draw(st.sampled_from(WHOLE))
    path = data.draw(st.sampled_from(places(whole)))
    fragments = [get(other, place) for _, other in WHOLE for place in places(other)]
    values = JSON | st.sampled_from(fragments) | WORDS | st.just(DEEP) | st.just({"content": DEEP})
    record = put(whole, path, data.draw(values))
    try:
        assert is_usable(shaper(whole, method=method).row(record, "a.jsonl:1"))
    except BadRow as error:
        assert str(error).startswith("a.jsonl:1: ") and any(re.search(rf"\b{field}\b", error.what) for field in record)
        assert error.kind and error.what.encode()


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted({field for _, whole in WHOLE for field in whole})), JSON, max_size=4))
def test_any_first_row_decides_or_is_refused(first: dict[str, Any]) -> None:
    for method in (Method.none, Method.dpo, Method.kto):
        try:
            assert is_usable(shaper(first, method=method).row(first, "a.jsonl:1"))
        except UserError as error:
            assert str(error).startswith("a.jsonl:1: ")


# ---- real files


@pytest.mark.skipif(not DATA.is_dir(), reason="the data folder beside the checkout is absent")
def test_real_files() -> None:
    lines = (DATA / "gsm8k_train.jsonl").read_text(encoding="utf-8").split("\n")
    records = [json.loads(line) for line in lines if line]
    made = shaper(records[0], prompt="question", completion="answer")
    rows = [made.row(record, "x:1") for record in records]
    assert len(rows) == 7473  # as published: openai/grade-school-math
    assert all(re.search(r"#### \S+$", row.messages[1]["content"]) for row in rows)
    with open(DATA / "self_instruct_seed_tasks.jsonl", encoding="utf-8") as file:
        task = json.loads(file.readline())
    error = refused(task, prompt="instruction", completion="instances")
    assert "a.jsonl:1: instances does not begin with an assistant turn" in str(error)
