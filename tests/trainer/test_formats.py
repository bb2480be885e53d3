"""Reading JSON Lines: every fault is answered with its line, and no held-out row is trained on."""

import json
import logging
import random
import re
from pathlib import Path

import pytest

from trainer.config.data import ColumnsConfig, DataConfig, DataSource
from trainer.config.errors import UserError
from trainer.data.formats import Row, load_rows, read_jsonl

DATA = Path(__file__).parents[3] / "shared" / "data"
NO_COLUMNS = ColumnsConfig()
GOOD = {"prompt": "2 + 2?", "completion": "4"}


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def jsonl(path: str, **keys: object) -> DataConfig:
    return DataConfig(source=DataSource.file, path=path, **keys)


def numbered(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(count)]


def test_three_shapes(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    path = write(tmp_path / "a.jsonl", {"messages": chat, "id": 7})
    assert read_jsonl(path, NO_COLUMNS) == [Row(chat, None, f"{path}:1")]
    assert read_jsonl(write(tmp_path / "b.jsonl", GOOD), NO_COLUMNS)[0].messages == chat
    path = write(tmp_path / "c.jsonl", {"text": "Once."})
    assert read_jsonl(path, NO_COLUMNS) == [Row(None, "Once.", f"{path}:1")]


def test_columns_rename_and_choose_the_shape(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "ignored", "question": "2 + 2?", "answer": "4"})
    with caplog.at_level(logging.INFO, "trainer"):
        (row,) = read_jsonl(path, ColumnsConfig(prompt="question", completion="answer"))
    assert [turn["content"] for turn in row.messages] == ["2 + 2?", "4"]
    assert caplog.messages == [f"{path}: 1 rows of prompt/completion (question -> prompt, answer -> completion)"]


def test_columns_of_two_shapes_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD)
    with pytest.raises(UserError, match=r"data\.columns\.prompt=q and data\.columns\.text=t name different shapes"):
        read_jsonl(path, ColumnsConfig(prompt="q", text="t"))


def test_lines_end_at_newline_bytes_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"text": "one\u2028still one\x85\u000b"}, {"text": "two"}]  # characters at which str.splitlines cuts
    lines = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"\xef\xbb\xbf" + lines[0] + b"\r\n  \n\n" + lines[1])  # a Windows editor's BOM and line end
    read = read_jsonl(str(path), NO_COLUMNS)
    assert [row.text for row in read] == [row["text"] for row in rows]
    assert [row.origin for row in read] == [f"{path}:1", f"{path}:4"]  # lines 2 and 3 are blank


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "completion" "b"}', r":2:30: broken JSON: Expecting ':' delimiter; write one complete"),
        ("{", r":2:\d+: broken JSON: .*one complete JSON object a line"),  # a pretty-printed file
        ("[1, 2]", r":2: the line is a list, not an object"),
        ("3", r":2: the line is a number, not an object"),
        ("[" * 100_000, r":2:1: broken JSON: "),  # deeper than the parser goes
        ('{"text": "other shape"}', r":2: no prompt and no completion among the fields text, but .* prompt/completion"),
        ('{"prompt": "a"}', r":2: no completion among the fields prompt"),
        ("{}", r":2: no prompt and no completion among the fields \(none\)"),
        ('{"prompt": "a", "completion": null}', r":2: completion is null; write a string"),
        ('{"prompt": 5, "completion": "b"}', r":2: prompt is a number; write a string"),
        ('{"prompt": "a", "completion": ["b"]}', r":2: completion is a list; write a string"),
        ('{"prompt": "a", "completion": " \\n"}', r":2: completion is empty; fill it or remove"),
        ('{"prompt": "", "completion": "b"}', r":2: prompt is empty; fill it or remove"),
        ('{"prompt": "\\ud83d", "completion": "b"}', r":2: prompt has half of a surrogate pair"),
    ],
)
def test_faulty_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(str(path)) + message):
        read_jsonl(str(path), NO_COLUMNS)


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "caf\xe9"}\n')
    # {"prompt": "caf is 15 bytes long, so the fault is byte 16
    with pytest.raises(UserError, match=r"a\.jsonl:2: byte 16 \(0xe9\) is not UTF-8; save the file as UTF-8"):
        read_jsonl(str(path), NO_COLUMNS)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=r"a\.jsonl holds no rows; write one JSON object a line"):
        read_jsonl(str(path), NO_COLUMNS)


def test_unknown_fields_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "a", "answer": "b"})
    message = r"a\.jsonl:1: found the fields question, answer, .*data\.columns\.prompt and data\.columns\.completion"
    with pytest.raises(UserError, match=message):
        read_jsonl(path, NO_COLUMNS)
    with pytest.raises(UserError, match=r"found the fields question, answer, but a row needs question and reply;"):
        read_jsonl(path, ColumnsConfig(prompt="question", completion="reply"))


USER = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", r"messages is a string; write a list of \{role, content\} objects"),
        ([], r"messages has no assistant turn"),
        ([USER], r"messages has no assistant turn"),
        ([ANSWER], r"messages begins with the assistant"),
        ([USER, ANSWER, ANSWER], r"messages\[1\] and messages\[2\] are both assistant turns"),
        ([USER, "4"], r"messages\[1\] is a string; write an object"),
        ([{"from": "human", "value": "a"}], r"messages\[0\] has the fields from, value; it needs role and content"),
        ([USER, {"role": "gpt", "content": "4"}], r"unknown role 'gpt'; accepted: system, user, assistant"),
        ([USER, {"role": ["user"], "content": "4"}], r"unknown role \['user'\]"),
        ([USER, {"role": "assistant", "content": None}], r"messages\[1\]\.content is null; write a string"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content is a list; write a string"),
        ([USER, {"role": "assistant", "content": ""}], r"messages\[1\]\.content is empty"),
        ([USER, {**ANSWER, "weight": 0}], r"messages\[1\] has weight besides role and content"),
    ],
)
def test_faulty_messages(tmp_path: Path, messages: object, message: str) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": messages})
    with pytest.raises(UserError, match=r"a\.jsonl:1: .*" + message):
        read_jsonl(path, NO_COLUMNS)


def test_empty_system_and_null_extras_are_fine(tmp_path: Path) -> None:
    # An empty system turn is how data switches a template's default system prompt off.
    messages = [{"role": "system", "content": ""}, USER, {**ANSWER, "tool_calls": None}]
    (row,) = read_jsonl(write(tmp_path / "a.jsonl", {"messages": messages}), NO_COLUMNS)
    assert row.messages == [{"role": "system", "content": ""}, USER, ANSWER]


def test_max_rows_takes_the_first(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *numbered(30), "a fault behind them")
    train, held_out = load_rows(jsonl(path, max_rows=20), seed=0)
    lines = sorted(int(row.origin.rsplit(":")[-1]) for row in train + held_out)
    assert lines == list(range(1, 21))
    assert len(held_out) == 2  # a tenth of 20


@pytest.mark.parametrize(("rows", "eval_rows", "expected"), [(2, 64, 1), (9, 64, 1), (100, 64, 10), (100, 3, 3)])
def test_how_many_are_held_out(tmp_path: Path, rows: int, eval_rows: int, expected: int) -> None:
    # min(eval_rows, a tenth of the rows), at least one
    path = write(tmp_path / "a.jsonl", *numbered(rows))
    train, held_out = load_rows(jsonl(path, eval_rows=eval_rows), seed=0)
    assert (len(train), len(held_out)) == (rows - expected, expected)
    assert not {row.origin for row in train} & {row.origin for row in held_out}


def test_held_out_rows_follow_the_seed_alone(tmp_path: Path) -> None:
    config = jsonl(write(tmp_path / "a.jsonl", *numbered(100)))
    random.seed(1)
    first = load_rows(config, seed=5)
    random.seed(2)
    state = random.getstate()
    assert load_rows(config, seed=5) == first
    assert random.getstate() == state
    assert load_rows(config, seed=6)[1] != first[1]
    # Sorting 100 rows by random.Random(5).random(), whose sequence Python keeps, puts these ten last.
    draw = random.Random(5).random
    keys = [draw() for _ in range(100)]
    expected = sorted(sorted(range(100), key=keys.__getitem__)[-10:])
    assert [row.origin for row in first[1]] == [f"{config.path}:{index + 1}" for index in expected]


def test_copies_of_held_out_rows_leave_train(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", *numbered(40), *numbered(40))
    with caplog.at_level(logging.INFO, "trainer"):
        train, held_out = load_rows(jsonl(path), seed=0)
    asked = [{row.messages[0]["content"] for row in rows} for rows in (train, held_out)]
    assert not asked[0] & asked[1]
    dropped = 80 - len(train) - len(held_out)
    assert dropped > 0 and f"{path}: {dropped} rows dropped, being copies of held-out rows" in caplog.messages


def test_eval_file(tmp_path: Path) -> None:
    train_path, eval_path = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    write(train_path, *numbered(10))
    write(eval_path, numbered(10)[3], {"prompt": "new", "completion": "row"}, GOOD)
    train, held_out = load_rows(jsonl(str(train_path), eval_path=str(eval_path), eval_rows=2), seed=0)
    assert [row.origin for row in held_out] == [f"{eval_path}:1", f"{eval_path}:2"]
    assert [row.origin for row in train] == [f"{train_path}:{line}" for line in range(1, 11) if line != 4]


def test_too_few_rows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has 1 row; one more is needed to hold out, or set data\.eval_path"):
        load_rows(jsonl(write(tmp_path / "a.jsonl", GOOD)), seed=0)
    with pytest.raises(UserError, match="every row is a copy of a held-out row"):
        load_rows(jsonl(write(tmp_path / "b.jsonl", GOOD, GOOD, GOOD)), seed=0)


def test_pydocs_rows() -> None:
    train, held_out = load_rows(DataConfig(max_rows=20, eval_rows=5), seed=0)
    assert (len(train), len(held_out)) == (20, 5)
    assert [turn["role"] for turn in train[0].messages] == ["user", "assistant"]
    assert train[0].origin.startswith("pydocs:")
    assert load_rows(DataConfig(max_rows=20, eval_rows=5), seed=1) == (train, held_out)  # the same for every seed


@pytest.mark.skipif(not DATA.is_dir(), reason="the data folder beside the checkout is absent")
def test_real_files() -> None:
    columns = ColumnsConfig(prompt="question", completion="answer")
    rows = read_jsonl(str(DATA / "gsm8k_train.jsonl"), columns)
    assert len(rows) == 7473  # as published: openai/grade-school-math
    assert all(re.search(r"#### \S+$", row.messages[1]["content"]) for row in rows)
    with pytest.raises(UserError, match=r"self_instruct_seed_tasks\.jsonl:1: instances is a list; write a string"):
        read_jsonl(
            str(DATA / "self_instruct_seed_tasks.jsonl"), ColumnsConfig(prompt="instruction", completion="instances")
        )
