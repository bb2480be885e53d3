"""`scripts/inspect_data.py` as a user runs it: a file with faults, the settings that training refuses, and a page."""

import json
import subprocess
import sys

import pytest

from tests.e2e.conftest import ROOT, environment

FOX = "The quick brown fox jumps over the lazy dog and runs away into the deep dark forest of the north."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("inspect")
    rows = [{"prompt": f"Add {i} and {i}", "completion": f"{2 * i} 🙂 Привет"} for i in range(12)]
    rows += [rows[2], {"prompt": "Tell me", "completion": FOX}]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    lines.insert(4, '{"prompt": "no answer"}')
    (path / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    held_out = [rows[7], {"prompt": "Tell him", "completion": f"Well. {FOX}"}]
    (path / "eval.jsonl").write_text("\n".join(map(json.dumps, held_out)) + "\n", encoding="utf-8")
    pairs = [{"prompt": f"Add {i}", "chosen": f"{2 * i}", "rejected": f"{3 * i + 1}"} for i in range(12)]
    (path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")
    return path


def inspect_data(folder, *arguments: str, check: bool = True, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "inspect_data.py"), "model=tiny", "data=file", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, **options)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def counts(done: subprocess.CompletedProcess) -> dict:
    return json.loads(done.stdout.splitlines()[-1])


def test_a_file_with_faults_is_shown_whole(folder):
    done = inspect_data(
        folder, "data.path=train.jsonl", "data.eval_path=eval.jsonl", "rows=2", "html=page.html", "data.packing=true"
    )
    found = counts(done)
    assert (found["source_rows"], found["rows"], found["held_out_rows"]) == (17, 13, 2)
    assert found["left_out"] == {"shape": {"rows": 1, "first": ["train.jsonl:5"]}}
    assert found["duplicates"]["first"] == [["train.jsonl:3", "train.jsonl:14"]]
    assert found["leaks"]["copied"] == ["train.jsonl:9"]
    (run,) = found["leaks"]["runs"]
    assert (run["held_out"], run["train"]) == ("eval.jsonl:2", "train.jsonl:15") and run["tokens"] >= len(FOX)
    assert {"CYRILLIC", "EMOJI"} <= found["scripts"].keys() and found["scripts"]["EMOJI"]["share"] == 1.0
    assert found["would_train"] is False and "train.jsonl:5" in found["refusals"][0]
    assert 0 < found["packing"]["efficiency"] <= 1
    assert "⟦0 🙂 Привет<|im_end|>⟧" in done.stdout and "\x1b" not in done.stdout
    assert "train.jsonl:5: no completion" in done.stdout
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "train.jsonl:15" in page


def test_training_agrees_with_what_was_said(folder, train):
    """The refusal is the one that training gives, and the counts are those of the run's log."""
    arguments = [f"data.path={folder}/train.jsonl", "train.max_steps=1", "data=file", "model=tiny", "conf=qlora"]
    refused = train(*arguments, check=False)
    said = counts(inspect_data(folder, f"data.path={folder}/train.jsonl", "json=true"))["refusals"][0]
    assert refused.returncode == 2 and said in " ".join(refused.stderr.split())


def test_one_row_with_its_tokens(folder):
    done = inspect_data(folder, "data.path=train.jsonl", "row=train.jsonl:1", "tokens=true")
    assert "0‹19›" in done.stdout and "🙂‹" in done.stdout and "<|im_end|>‹2›" in done.stdout
    bad = inspect_data(folder, "data.path=train.jsonl", "row=train.jsonl:5")
    assert "no completion" in bad.stdout and '{"prompt": "no answer"}' in bad.stdout


def test_preferences_show_both_sides(folder):
    done = inspect_data(folder, "conf=dpo", "data.path=pairs.jsonl", "rows=1")
    assert "[chosen]" in done.stdout and "[rejected]" in done.stdout
    assert counts(done)["rows"] == 11


def test_standard_input_and_json_alone(folder):
    rows = (folder / "pairs.jsonl").read_text()
    options = ("data.columns.completion=chosen", "data.path=-", "json=true")
    done = inspect_data(folder, *options, input=rows)
    assert len(done.stdout.splitlines()) == 1 and counts(done)["source_rows"] == 12


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("data.path=missing.jsonl",), "data.path=missing.jsonl is no file or folder"),
        (("data.path=train.jsonl", "row=train.jsonl:99"), "row=train.jsonl:99"),
        (("data.path=train.jsonl", "only=odd"), "only=odd"),
        (("data.path=train.jsonl", "html=nowhere/page.html"), "html=nowhere/page.html"),
    ],
)
def test_mistakes_are_answered_in_a_line(folder, arguments, words):
    done = inspect_data(folder, *arguments, check=False)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
