"""`scripts/inspect_data.py` as a user runs it: a file with faults, the settings that training refuses, and a page."""

import json
import subprocess
import sys

import pytest

from tests.e2e.conftest import ROOT, environment
from trainer.kernels import _cpp

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


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """The environment with a cache over the compiled kernels: tables of these files and no others."""
    path = tmp_path_factory.mktemp("cache")
    (path / "kernels").symlink_to(_cpp.cache_dir(), target_is_directory=True)
    return {**environment(), "LOWBIT_CACHE": str(path)}


@pytest.fixture
def inspect_data(folder, own_cache):
    """Runs the script on a tiny model, beside the files; returns the finished process."""

    def run(*arguments: str, check: bool = True, script: str = "scripts/inspect_data.py", **options):
        command = [sys.executable, str(ROOT / script), "model=tiny", "data=file", *arguments]
        done = subprocess.run(command, cwd=folder, env=own_cache, capture_output=True, text=True, **options)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    return run


def counts(done: subprocess.CompletedProcess) -> dict:
    return json.loads(done.stdout.splitlines()[-1])


def test_a_file_with_faults_is_shown_whole(inspect_data, folder):
    done = inspect_data(
        "data.path=train.jsonl", "data.eval_path=eval.jsonl", "rows=2", "html=page.html", "data.packing=true"
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


def test_training_stops_at_what_was_said(inspect_data):
    said = counts(inspect_data("data.path=train.jsonl", "json=true"))["refusals"][0]
    refused = inspect_data(
        *("conf=qlora", "data.path=train.jsonl", "train.max_steps=1", "output_dir=out"), script="train.py", check=False
    )
    assert refused.returncode != 0 and said in " ".join((refused.stdout + refused.stderr).split())


def test_one_row_with_its_tokens(inspect_data):
    done = inspect_data("data.path=train.jsonl", "row=train.jsonl:1", "tokens=true")
    assert "0‹19›" in done.stdout and "🙂‹" in done.stdout and "<|im_end|>‹2›" in done.stdout
    bad = inspect_data("data.path=train.jsonl", "row=train.jsonl:5")
    lines = bad.stdout.splitlines()
    assert "train.jsonl:5: no completion" in lines[1] and lines[2] == '{"prompt": "no answer"}'


def test_preferences_show_both_sides(inspect_data):
    done = inspect_data("conf=dpo", "data.path=pairs.jsonl", "rows=1")
    assert "[chosen]" in done.stdout and "[rejected]" in done.stdout
    assert counts(done)["rows"] == 11


def test_standard_input_and_json_alone(inspect_data, folder):
    rows = (folder / "pairs.jsonl").read_text()
    options = ("data.columns.completion=chosen", "data.path=-", "json=true")
    done = inspect_data(*options, input=rows)
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
def test_mistakes_are_answered_in_a_line(inspect_data, arguments, words):
    done = inspect_data(*arguments, check=False)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
