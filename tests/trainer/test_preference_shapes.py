"""Fields of preferences as pairs and labelled answers: every fault has its place and its kind."""

from typing import Any

import pytest

from trainer.config.data import ColumnsConfig, DataSource, RowFormat, SourceConfig
from trainer.config.errors import UserError
from trainer.config.preference import Method
from trainer.data.rows import BadRow, Example, Labelled
from trainer.data.shaping.shapes import Shaper, make_shaper

USER, HELLO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
GO, WHAT = {"role": "assistant", "content": "Go away"}, {"role": "user", "content": "What?"}
SYSTEM = {"role": "system", "content": "Be kind."}
TURNS = [USER, HELLO]
PAIR = {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"}
ANSWER = {"prompt": "Hi", "completion": "Hello", "label": True}
TOOL = {"type": "function", "function": {"name": "wave"}}
UNLEARNED = {**HELLO, "train": False}


def shaper(
    first: dict[str, Any], method: Method = Method.dpo, format: RowFormat = RowFormat.auto, **columns: str
) -> Shaper:
    source = SourceConfig(source=DataSource.pydocs, format=format, columns=ColumnsConfig(**columns))
    return make_shaper(first, "a.jsonl:1", source, method)


def row(record: dict[str, Any], method: Method = Method.dpo, **columns: str) -> Example:
    return shaper(record, method, **columns).row(record, "a.jsonl:1")


@pytest.mark.parametrize(
    "record",
    [
        PAIR,
        {**PAIR, "prompt": [USER]},
        {"prompt": [USER], "chosen": [HELLO], "rejected": [GO]},
        {"prompt": "Hi", "chosen": [HELLO], "rejected": "Go away"},
        {"chosen": [USER, HELLO], "rejected": [USER, GO]},
        {"prompt": "Hi", "chosen": [USER, HELLO], "rejected": [USER, GO]},
        {"prompt": [USER], "chosen": [USER, HELLO], "rejected": [USER, GO]},
        {"prompt": None, "chosen": [USER, HELLO], "rejected": [USER, GO], "messages": [USER, HELLO], "score": 3},
    ],
)
def test_shapes_of_a_pair(record: dict[str, Any]) -> None:
    pair = row(record)
    assert [pair.chosen.messages, pair.rejected.messages] == [[USER, HELLO], [USER, GO]]
    assert (pair.chosen.prompt_len, pair.rejected.prompt_len) == (1, 1)
    assert pair.origin == "a.jsonl:1" and row(record, Method.orpo) == pair
    # A system prompt and tools beside them belong to the prompt of both.
    with_more = row({**record, "system": "Be kind.", "tools": [TOOL]})
    for side, answer in ((with_more.chosen, HELLO), (with_more.rejected, GO)):
        assert side.messages == [SYSTEM, USER, answer] and side.prompt_len == 2 and side.tools == [TOOL]


def test_columns_are_mapped() -> None:
    made = shaper({"q": "Hi", "good": "Hello", "bad": "Go away"}, prompt="q", chosen="good", rejected="bad")
    assert made.description == "chosen, rejected with prompt (good -> chosen, bad -> rejected, q -> prompt)"
    pair = made.row({"q": "Hi", "good": "Hello", "bad": "Go away"}, "x:1")
    assert pair.chosen.messages == [USER, HELLO] and pair.rejected.messages == [USER, GO]
    answer = row({"q": "Hi", "a": "Hello", "ok": False}, Method.kto, prompt="q", completion="a", label="ok")
    assert answer == Labelled(answer.row, False) and answer.row.messages == [USER, HELLO]
    assert answer.row.prompt_len == 1


def test_texts_share_their_beginning() -> None:
    """As TRL: what both begin with is the prompt, but for a space before the answer."""
    pair = row({"chosen": "Human: Hi\nBot: Hello", "rejected": "Human: Hi\nBot: Go away"})
    assert pair.chosen.text[: pair.chosen.prompt_len] == "Human: Hi\nBot:" and pair.rejected.prompt_len == 14


@pytest.mark.parametrize(
    ("record", "kind", "message"),
    [
        ({**PAIR, "rejected": "Hello"}, "equal answers", "chosen and rejected are equal, so nothing is preferred"),
        ({**PAIR, "rejected": [HELLO]}, "equal answers", "chosen and rejected say the same"),
        ({**PAIR, "rejected": " "}, "empty", "rejected is empty; fill it"),
        ({**PAIR, "chosen": None}, "type", "chosen is null; write a string"),
        ({**PAIR, "chosen": []}, "no assistant turn", "chosen does not begin with an assistant turn"),
        ({**PAIR, "prompt": []}, "empty", "prompt is empty"),
        ({"prompt": "Hi", "chosen": "Hello"}, "shape", "no rejected among the fields prompt, chosen; "),
        ({"prompt": "Hi"}, "shape", "name the file's fields with data.columns.prompt, data.columns.chosen, data.colu"),
        (
            {"chosen": "Hello", "rejected": [GO]},
            "type",
            "chosen is a string and rejected is a list, and there is no pr",
        ),
        ({"chosen": "Hello", "rejected": "Go"}, "different prompts", "begin differently, so there is no prompt"),
        ({"chosen": "Hello", "rejected": "Hello you"}, "empty", "chosen ends where the two begin to differ"),
        (
            {"chosen": "a b", "rejected": "a c", "system": "x"},
            "unknown key",
            "which have no system prompt and no tools",
        ),
        (
            {"chosen": [USER, HELLO], "rejected": [WHAT, GO]},
            "different prompts",
            "chosen and rejected have different prompts: they differ in turn 0",
        ),
        ({"chosen": [*TURNS, USER, HELLO], "rejected": [*TURNS, WHAT, GO]}, "different prompts", "in turn 2"),
        ({"chosen": TURNS, "rejected": [*TURNS, WHAT, GO]}, "empty", "equal up to the end of chosen, whose answer"),
        ({"chosen": TURNS, "rejected": [USER, UNLEARNED, WHAT, GO]}, "empty", "equal up to the end of chosen"),
        (
            {"prompt": "Ho", "chosen": TURNS, "rejected": [USER, GO]},
            "different prompts",
            "prompt is not what chosen and",
        ),
        ({"prompt": [WHAT], "chosen": TURNS, "rejected": [USER, GO]}, "different prompts", "prompt is not what chosen"),
        ({"prompt": 3, "chosen": TURNS, "rejected": [USER, GO]}, "different prompts", "prompt is not what chosen and"),
        (
            {"chosen": [USER, UNLEARNED], "rejected": [USER, GO]},
            "no target",
            "chosen has no assistant turn that is lea",
        ),
        (
            {"chosen": [USER, HELLO, WHAT, GO], "rejected": [USER, HELLO, WHAT, UNLEARNED]},
            "no target",
            "rejected has no assistant turn that is learned",
        ),
        ({**PAIR, "tools": [3]}, "tools", "tools[0] is no function"),
    ],
)
def test_a_bad_pair_is_named(record: dict[str, Any], kind: str, message: str) -> None:
    with pytest.raises(BadRow) as caught:
        shaper(PAIR).row(record, "a.jsonl:2")
    assert caught.value.kind == kind and caught.value.where == "a.jsonl:2" and message in caught.value.what


def test_answers_nested_too_deeply_to_compare() -> None:
    chosen, rejected = [], []
    for _ in range(5000):  # Python compares about 1000 levels
        chosen, rejected = [chosen], [rejected]
    with pytest.raises(BadRow, match=r"chosen\[0\] is a list; write an object"):
        row({"chosen": chosen, "rejected": rejected})


@pytest.mark.parametrize(("written", "expected"), [("true", True), ("True", True), ("FALSE", False)])
def test_a_label_of_a_csv_is_a_string(written: str, expected: bool) -> None:
    assert row({**ANSWER, "label": written}, Method.kto).desirable is expected


@pytest.mark.parametrize(
    ("record", "kind", "message"),
    [
        ({**ANSWER, "label": 1}, "label", "label is 1; write true for a good answer and false for a bad one"),
        ({**ANSWER, "label": "yes"}, "label", "label is 'yes'; write true"),
        ({**ANSWER, "completion": ""}, "empty", "completion is empty"),
        ({**ANSWER, "completion": [USER]}, "no assistant turn", "completion does not begin with an assistant turn"),
        ({"prompt": "Hi", "completion": "Hello"}, "shape", "no label among the fields prompt, completion"),
    ],
)
def test_a_bad_labelled_answer_is_named(record: dict[str, Any], kind: str, message: str) -> None:
    with pytest.raises(BadRow) as caught:
        shaper(ANSWER, Method.kto).row(record, "a.jsonl:2")
    assert caught.value.kind == kind and caught.value.where == "a.jsonl:2" and message in caught.value.what


def test_settings_that_do_not_fit() -> None:
    with pytest.raises(UserError, match=r"data\.format=text has no effect with preference\.method=dpo"):
        shaper(PAIR, format=RowFormat.text)
    with pytest.raises(UserError, match=r"data\.columns\.text=prompt has no effect with preference\.method=dpo, whose"):
        shaper(PAIR, text="prompt")
    with pytest.raises(UserError, match=r"data\.columns\.label=prompt has no effect with preference\.method=orpo"):
        shaper(PAIR, Method.orpo, label="prompt")
    with pytest.raises(
        UserError, match=r"no q among the fields prompt, chosen, rejected; .* needs chosen, rejected, q"
    ):
        shaper(PAIR, prompt="q")
    with pytest.raises(
        UserError, match=r"a\.jsonl:1: data\.columns\.system=sys is not among the fields prompt, chosen"
    ):
        shaper(PAIR, system="sys")
