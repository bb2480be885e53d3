"""What models are asked: windows and their protocol, prompts, multiple choice, word problems."""

import json

import pytest

from trainer.config.errors import UserError
from trainer.config.evaluation import EvaluationConfig
from trainer.config.model import named_model
from trainer.evaluate.quality.asking import Questions, require_same_tokens, tokenizer_of
from trainer.evaluate.quality.bootstrap import Resampler
from trainer.evaluate.quality.choices import Choice, ChoiceRows, compare_choices, read_choices
from trainer.evaluate.quality.gsm8k import Problems, compare_problems
from trainer.evaluate.quality.material import Prompts, Windows
from trainer.evaluate.quality.subject import Subject, made_from


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of(Subject.of("tiny", "server"))


def config(**settings):
    return EvaluationConfig(run="tiny", **settings)


def lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_windows_are_disjoint_pieces_from_the_start(tokenizer, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one two three four five six")
    found = Windows.of(config(text=str(path), windows=5, window=8), tokenizer)
    assert [tokenizer.decode(row) for row in found.rows] == ["one two ", "three fo", "ur five "]
    assert found.protocol["scored_tokens"] == 21 and found.protocol["windows"] == 3 and not found.protocol["bos"]
    assert (found.words, found.bytes) == (2 + 2 + 2, 21)  # without each window's first token
    with_first = Windows.of(config(text=str(path), windows=5, window=8, bos=True), tokenizer)
    assert [row[0] for row in with_first.rows] == [tokenizer.bos_token_id] * 3
    assert with_first.protocol["scored_tokens"] == 24 and with_first.bytes == 24


def test_a_text_that_is_too_short_is_refused(tokenizer, tmp_path):
    (tmp_path / "t.txt").write_text("short")
    with pytest.raises(UserError, match="t.txt has 5 tokens, a window has 8; lower window"):
        Windows.of(config(text=str(tmp_path / "t.txt"), window=8), tokenizer)


def test_the_default_text_and_prompts_are_held_out(tokenizer):
    from trainer.data.pydocs import load_questions

    found = Windows.of(config(windows=2, window=32), tokenizer)
    train = {question.answer for question in load_questions(eval_rows=1)[0]}
    assert len(found.rows) == 2 and tokenizer.decode(found.rows[0])[:30] not in "".join(sorted(train))
    assert len(Prompts.of(config(num_prompts=3), tokenizer).rows) == 3
    assert Prompts.of(config(num_prompts=0), tokenizer).rows == []


def test_prompts_of_a_file(tokenizer, tmp_path):
    turns = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "not asked"}]
    path = lines(tmp_path / "p.jsonl", {"prompt": "a"}, {"question": "b"}, {"messages": turns})
    found = Prompts.of(config(prompts=path), tokenizer)
    assert found.texts == ["a", "b", "c"]
    assert tokenizer.decode(found.rows[2]) == "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("line", "match"),
    [('{"x": 1}', "line 2: no prompt; give prompt.*found x"), ("{", "line 2 is no JSON"), ("[1]", "no JSON object")],
)
def test_a_line_without_a_prompt_is_named(tokenizer, tmp_path, line, match):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(UserError, match=match):
        Prompts.of(config(prompts=str(tmp_path / "p.jsonl")), tokenizer)


# ---- multiple choice


def test_choices_of_a_file_and_of_numbers(tmp_path):
    path = lines(
        *(tmp_path / "c.jsonl", {"prompt": "2+2 =", "choices": [" 4", " 5"], "gold": 0}),
        {"question": "How many?", "answer": "some\n#### 18"},
    )
    plain, number = read_choices(tmp_path / "c.jsonl", limit=9, seed=0)
    assert plain == Choice("2+2 =", (" 4", " 5"), 0)
    assert number.choices[number.gold] == " 18" and len(set(number.choices)) == 4
    assert read_choices(tmp_path / "c.jsonl", limit=9, seed=0)[1] == number and path


def test_right_choices_stand_everywhere(tmp_path):
    """A model that always takes the first one must not be right."""
    records = [{"question": "?", "answer": f"#### {n}"} for n in range(60)]
    lines(tmp_path / "c.jsonl", *records)
    golds = [choice.gold for choice in read_choices(tmp_path / "c.jsonl", limit=60, seed=0)]
    assert all(golds.count(place) > 5 for place in range(4))


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ({"prompt": "a", "choices": ["b"], "gold": 0}, "at least two"),
        ({"prompt": "a", "choices": ["b", "c"], "gold": 2}, "gold=2; give the number of the right choice, 0 to 1"),
        ({"question": "a", "answer": "none"}, "the answer holds no number"),
    ],
)
def test_rows_that_are_no_choice(tmp_path, record, match):
    lines(tmp_path / "c.jsonl", record)
    with pytest.raises(UserError, match=match):
        read_choices(tmp_path / "c.jsonl", limit=9, seed=0)


def test_a_blank_at_the_end_of_a_prompt_belongs_to_the_choice(tokenizer):
    rows = ChoiceRows.of([Choice("ab ", ("c", "de"), 0)], tokenizer)
    assert [tokenizer.decode(row[s:]) for row, s in zip(rows.rows, rows.starts, strict=True)] == [" c", " de"]


def test_who_changed_sides(tokenizer):
    rows = ChoiceRows.of([Choice("a", (" b", " cccc"), 0)] * 4, tokenizer)
    first, second = [-1.0, -2.0], [-2.0, -1.5]
    found = compare_choices(rows, [first, first, first, second], [first, second, second, first], Resampler(4))
    assert found["accuracy_original"]["value"] == 0.75 and found["accuracy"]["value"] == 0.5
    assert (found["right_to_wrong"]["value"], found["wrong_to_right"]["value"]) == (0.5, 0.25)
    assert found["accuracy_a_byte"]["value"] == 0 and found["chance"] == 0.5  # a byte, the long one always is likelier


# ---- word problems


def test_problems_with_solved_examples(tokenizer, tmp_path):
    test = lines(
        tmp_path / "test.jsonl", {"question": "Q1", "answer": "#### 4"}, {"question": "Q2", "answer": "#### 1,000"}
    )
    train = lines(
        *(tmp_path / "train.jsonl", {"question": "Q1", "answer": "seen\n#### 4"}),
        {"question": "E", "answer": "2+3=<<2+3=5>>5\n#### 5"},
    )
    settings = config(gsm8k=test, shots=1, shots_from=train)
    problems = Problems.of(settings, tokenizer)
    asked = tokenizer.decode(problems.rows[0])
    assert asked.index("E\n") < asked.index("2+3=5\n#### 5") < asked.index("Q1") and asked.count("Q1") == 1
    lines_found = problems.judge(["so 4", "#### 1000.0 dollars"])
    assert [line["right"] for line in lines_found] == [True, True]
    assert problems.judge(["none", "999"])[0]["number"] is None
    with pytest.raises(UserError, match="has 1 questions that are not asked"):
        Problems.of(config(gsm8k=test, shots=2, shots_from=train), tokenizer)


def test_problems_of_base_and_tuned():
    was = [{"right": right, "number": "1"} for right in (True, True, False, False)]
    now = [{"right": right, "number": None} for right in (True, False, True, True)]
    found = compare_problems(was, now, Resampler(4))
    assert found["exact_match"]["value"] == 0.75 and found["exact_match_original"]["value"] == 0.5
    assert (found["right_to_wrong"]["value"], found["wrong_to_right"]["value"]) == (0.25, 0.5)
    assert found["without_number"] == 4 and "exact_match_original" not in compare_problems(None, now, Resampler(4))


def test_the_longest_row_counts_its_answer(tokenizer, tmp_path):
    (tmp_path / "t.txt").write_text("x" * 40)
    path = lines(tmp_path / "p.jsonl", {"prompt": "a"})
    settings = config(text=str(tmp_path / "t.txt"), window=20, windows=2, prompts=path, max_new_tokens=50)
    questions = Questions.of(settings, tokenizer)
    assert questions.longest == len(questions.prompts.rows[0]) + 50


# ---- subjects


def test_the_original_of_an_export_is_what_its_report_names(tmp_path):
    (tmp_path / "quantize.json").write_text(json.dumps({"settings": {"model": "tiny"}}))
    (tmp_path / "export" / "gptq").mkdir(parents=True)
    assert made_from(str(tmp_path)) == made_from(str(tmp_path / "export" / "gptq")) == "tiny"
    with pytest.raises(UserError, match="against is not set"):
        made_from("org/name")


def test_another_vocabulary_is_refused(tokenizer):
    class Other:
        def get_vocab(self):
            return {}

    with pytest.raises(UserError, match="another vocabulary.*against="):
        require_same_tokens(Subject.of("tiny", "server"), Other(), tokenizer)
    assert named_model("tiny") == Subject.of("tiny", "server").source
