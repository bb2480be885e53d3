"""Pairs and labelled answers from files and docstrings: every fault has its line, and only answers are learned."""

import json

import pytest

from tests.trainer.tokens import tokens_of
from trainer.config.data import ColumnsConfig, DataConfig, DataSource
from trainer.config.errors import UserError
from trainer.config.model import ModelConfig, ModelSource
from trainer.config.preference import Method
from trainer.data.dataset import load_data
from trainer.data.demonstration import pydocs_records
from trainer.data.loader import group_by_length, row_len
from trainer.data.opening import open_source, read_examples
from trainer.data.preference import collate_labelled, collate_pairs, with_mismatched
from trainer.model import load_model

USER, HELLO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
GO, WHAT = {"role": "assistant", "content": "Go away"}, {"role": "user", "content": "What?"}
TURNS = [USER, HELLO]
PAIR = {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"}
ANSWER = {"prompt": "Hi", "completion": "Hello", "label": True}


@pytest.fixture(scope="module")
def tokenizer():
    return load_model(ModelConfig(ModelSource.tiny))[1]


@pytest.fixture
def read(tmp_path):
    """Reads these objects as a file."""

    def of(*rows: dict, method: Method = Method.dpo, **columns: str):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = DataConfig(source=DataSource.file, path=str(path), columns=ColumnsConfig(**columns))
        return list(read_examples(open_source(config.sources()[0], config, method)))

    return of


def test_texts_share_their_beginning(read, tokenizer):
    """As TRL: what both begin with is the prompt, but for a space before the answer."""
    (pair,) = read({"chosen": "Human: Hi\nBot: Hello", "rejected": "Human: Hi\nBot: Go away"})
    row = tokens_of([pair], tokenizer)[0]
    for prefix, answer in (("", " Hello"), ("rejected_", " Go away")):
        targets = [label for label in row[f"{prefix}labels"] if label != -100]
        assert tokenizer.decode(targets) == f"{answer}<|im_end|>"


def test_only_the_answer_is_learned(read, tokenizer):
    """Earlier assistant turns belong to the prompt."""
    (pair,) = read({"chosen": [*TURNS, WHAT, HELLO], "rejected": [*TURNS, WHAT, GO]})
    row = tokens_of([pair], tokenizer)[0]
    assert tokenizer.decode([label for label in row["labels"] if label != -100]) == "Hello<|im_end|>"
    assert tokenizer.decode([label for label in row["rejected_labels"] if label != -100]) == "Go away<|im_end|>"


def test_a_cut_never_takes_the_whole_answer_or_the_difference(read, tokenizer):
    (pair,) = read({**PAIR, "chosen": "The same and A", "rejected": "The same and B"})
    length = len(tokens_of([pair], tokenizer)[0]["input_ids"])
    with pytest.raises(UserError, match=r"rows.jsonl:1: no target token is left"):
        tokens_of([pair], tokenizer, max_seq_len=length - 16)
    with pytest.raises(UserError, match=r"rows.jsonl:1: the two answers are equal in the first \d+ tokens"):
        tokens_of([pair], tokenizer, max_seq_len=length - 4)


def test_a_mismatched_answer_belongs_to_another_prompt(read, tokenizer):
    """The nearest row before, in a circle; not one with the same prompt."""
    rows = read(
        {"prompt": "one", "completion": "1", "label": True},
        {"prompt": "one", "completion": "uno", "label": False},
        {"prompt": "two", "completion": "2", "label": True},
        method=Method.kto,
    )
    tokens = tokens_of(rows, tokenizer)
    table = with_mismatched(tokens, donors=tokens, max_seq_len=512)
    found = [tokenizer.decode([label for label in labels if label != -100]) for labels in table["mismatched_labels"]]
    assert found == ["2<|im_end|>", "2<|im_end|>", "uno<|im_end|>"]
    for row in table:
        prompt = row["labels"].count(-100) - 1  # the template's newline behind the answer has no label either
        assert row["mismatched_input_ids"][:prompt] == row["input_ids"][:prompt]
    alone = with_mismatched(tokens.select([0]), donors=tokens, max_seq_len=512)  # a held-out set of one row
    assert tokenizer.decode([label for label in alone[0]["mismatched_labels"] if label != -100]) == "2<|im_end|>"
    with pytest.raises(UserError, match="rows.jsonl:1: all rows have one prompt"):
        with_mismatched(tokens.select([0, 1]), donors=tokens.select([0, 1]), max_seq_len=512)
    cut = with_mismatched(tokens, donors=tokens, max_seq_len=len(tokens[2]["input_ids"]) - 2)
    assert max(map(len, cut["mismatched_input_ids"])) == len(tokens[2]["input_ids"]) - 2


def test_batches(read, tokenizer):
    rows = list(tokens_of(read(PAIR, {**PAIR, "prompt": "Hi there"}), tokenizer))
    batch = collate_pairs(rows)
    lengths = [len(row[name]) for row in rows for name in ("input_ids", "rejected_input_ids")]
    assert batch["cu_seqlens"].diff().tolist() == lengths and row_len(rows[0]) == sum(lengths[:2])
    assert collate_pairs([])["cu_seqlens"].tolist() == [0, 1]
    assert [len(rows) for rows in group_by_length(rows, sum(lengths))] == [2]
    assert [len(rows) for rows in group_by_length(rows, sum(lengths) - 1)] == [1, 1]  # a pair stays in one pass
    answers = read(ANSWER, {**ANSWER, "prompt": "Ho", "label": False}, method=Method.kto)
    tokens = tokens_of(answers, tokenizer)
    batch = collate_labelled(list(with_mismatched(tokens, donors=tokens, max_seq_len=512)))
    assert batch["desirable"].tolist() == [True, False] and len(batch["mismatched"]["cu_seqlens"]) == 3
    assert collate_labelled([])["desirable"].tolist() == []


def test_docstrings_make_a_demonstration():
    """Right answers are docstrings of what is asked for, wrong ones others of the same module, where it has some."""
    train, held_out = pydocs_records(Method.dpo, eval_rows=16)
    assert len(held_out) == 16 and not {str(row) for _, row in train} & {str(row) for _, row in held_out}
    answers = {row["chosen"]: origin.split(".")[0] for origin, row in train}
    modules = [(origin.split(".")[0], answers[row["rejected"]]) for origin, row in train]
    # a few docstrings stand in two modules, and a few modules have one name that is documented
    assert sum(one == other for one, other in modules) > 0.95 * len(modules)
    labelled, _ = pydocs_records(Method.kto, eval_rows=16)
    assert [row["label"] for _, row in labelled[:4]] == [True, False, True, False]
    for (_, row), (_, pair) in zip(labelled, train, strict=True):
        assert row["completion"] == pair["chosen" if row["label"] else "rejected"]


def test_no_held_out_pair_is_trained_on(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**PAIR, "prompt": f"Hi {i % 15}"}) + "\n" for i in range(30)))
    data = load_data(DataConfig(source=DataSource.file, path=str(path)), Method.orpo, tokenizer, 0)
    seen = {str(row["input_ids"]) for row in data.held_out}
    assert seen and not seen & {str(row["input_ids"]) for row in data.train}
