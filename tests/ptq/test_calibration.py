"""The rows that a model is calibrated on: from where, how many, how long; what is wrong with them is said."""

import json

import pytest
from transformers import AutoTokenizer

from trainer import UserError
from trainer.config.ptq import PtqConfig
from trainer.ptq.calibration import Calibration, load_calibration, warn_of_calibration
from trainer.sources.tiny import tiny_model


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny_model())


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("".join(f"{i} words of a text. " for i in range(400)))
    return path


def config(data, **settings) -> PtqConfig:
    return PtqConfig(model="tiny", data=str(data), **{"rows": 8, "eval_rows": 4, "max_seq_len": 32} | settings)


def test_text_is_cut_into_rows_whose_last_are_held_out(text, tokenizer):
    ids = tokenizer(text.read_text(), verbose=False)["input_ids"]
    rows = [ids[start : start + 32] for start in range(0, len(ids) - 31, 32)]
    found = load_calibration(config(text), tokenizer)
    assert found.held_out == rows[-4:]
    assert len(found.rows) == 8 and all(row in rows[:-4] for row in found.rows)
    assert len({tuple(row) for row in found.rows}) == 8
    assert found.description == "8 rows, 256 tokens of mine.txt"
    again, other = load_calibration(config(text), tokenizer), load_calibration(config(text, seed=1), tokenizer)
    assert again.rows == found.rows and other.rows != found.rows and other.held_out == found.held_out


def test_sources_share_the_rows(text, tokenizer, tmp_path):
    chat = tmp_path / "chat.jsonl"
    chat.write_text("".join(json.dumps({"q": f"{i}?", "a": "yes"}) + "\n" for i in range(40)))
    found = load_calibration(config(f"pydocs,{chat},{text}", rows=9, columns=["prompt=q", "completion=a"]), tokenizer)
    assert len(found.rows) == 9 and len(found.held_out) == 4
    assert found.description.endswith("of pydocs and chat.jsonl and mine.txt")
    texts = [tokenizer.decode(row) for row in found.rows]
    assert all("?" in text and "yes" in text for text in texts[3:6])
    assert all(len(row) <= 32 for row in found.rows)  # a row is cut, whatever of it is left


def test_what_cannot_be_read(text, tokenizer, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("only this")
    with pytest.raises(UserError, match="short.txt makes 0 rows of max_seq_len=32 tokens, and eval_rows=4"):
        load_calibration(config(short), tokenizer)
    broken = tmp_path / "broken.txt"
    broken.write_bytes(b"abc\xff")
    with pytest.raises(UserError, match="broken.txt is not UTF-8 at byte 4"):
        load_calibration(config(broken), tokenizer)
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"prompt": "a", "completion": "b"}\n' * 9)
    with pytest.raises(UserError, match="columns has prompts=x"):
        load_calibration(config(chat, columns=["prompts=x"]), tokenizer)
    with pytest.raises(UserError, match="neither pydocs nor a .jsonl or .txt file"):
        config("data.csv")


def test_rows_of_one_token_predict_nothing(tokenizer, tmp_path):
    path = tmp_path / "short.jsonl"
    path.write_text(
        "".join(json.dumps({"text": letter * (1 + 9 * (letter > "m"))}) + "\n" for letter in "abcdnopqrstu")
    )
    found = load_calibration(config(path, rows=12), tokenizer)
    assert all(len(row) > 1 for row in found.rows + found.held_out) and found.rows and found.held_out
    path.write_text("".join(json.dumps({"text": letter}) + "\n" for letter in "abcdefgh"))
    with pytest.raises(UserError, match="only rows of one token"):
        load_calibration(config(path), tokenizer)


def test_what_is_doubtful_is_said(caplog):
    good = Calibration([[1] * 64] * 10, [[1, 2]], "")
    assert warn_of_calibration(good, widest=80, loss=3.0) == [] and not caplog.records
    few = warn_of_calibration(good, widest=81, loss=3.0)
    assert len(few) == 1 and "give 648 or more" in few[0]
    short = warn_of_calibration(Calibration([[1] * 31] * 100, [], ""), widest=8, loss=3.0)
    assert len(short) == 1 and "31 tokens or fewer" in short[0]
    foreign = warn_of_calibration(good, widest=8, loss=6.01)
    assert len(foreign) == 1 and "6.01 nats a token" in foreign[0]
    assert len(caplog.records) == 3
