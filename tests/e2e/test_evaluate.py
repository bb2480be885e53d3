"""scripts/evaluate.py as a user runs it, on the tiny model: against itself, and against its rounding to INT4."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, environment
from trainer import PtqConfig, quantize
from trainer.config.evaluation import EvaluationConfig
from trainer.evaluate.quality.evaluation import evaluate

SMALL = {"windows": 6, "window": 40, "max_new_tokens": 6, "dtype": "float32", "resamples": 200}


def evaluate_script(*arguments: str | Path) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "scripts" / "evaluate.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment())


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    folder = tmp_path_factory.mktemp("material")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog, and so on; " * 10)
    prompts = [{"prompt": f"What is {n} times {n}?"} for n in range(5)]
    problems = [{"question": f"{n} plus {n}?", "answer": f"#### {2 * n}"} for n in range(6)]
    for name, records in (("prompts", prompts), ("problems", problems)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    """INT4 in groups of 32, rounded to nearest."""
    folder = tmp_path_factory.mktemp("ptq") / "rtn"
    settings = {"method": "rtn", "codebook": "int4", "group_size": 32, "rows": 4, "max_seq_len": 64, "eval_rows": 2}
    quantize(PtqConfig(model="tiny", dtype="float32", output_dir=str(folder), **settings))
    return folder


def settings(material, **others):
    files = {"text": material / "text.txt", "prompts": material / "prompts.jsonl"}
    return {**SMALL, **{key: str(path) for key, path in files.items()}, **others}


def test_the_command_from_files_to_files(material, rounded, tmp_path):
    given = settings(material, gsm8k=material / "problems.jsonl", choices=material / "problems.jsonl", out=tmp_path)
    given |= {"gsm8k_max_new_tokens": 5, "gsm8k_rows": 4}
    done = evaluate_script(f"run=tiny,{rounded}", *(f"{key}={value}" for key, value in given.items()), "against=tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    said, written = json.loads(done.stdout.splitlines()[-1]), json.loads((tmp_path / "evaluation.json").read_text())
    same, int4 = said["candidates"]
    assert (same["kl"]["value"], same["same_token"]["value"], same["prompts"]["exact"]["value"]) == (0, 1, 1)
    assert same["perplexity_ratio"] == {"value": 1, "low": 1, "high": 1} and same["recovered"] is None
    assert 0 < int4["kl"]["low"] <= int4["kl"]["value"] <= int4["kl"]["high"] < 0.1
    assert int4["kl"]["value"] > 10 * max(floor["kl"]["value"] for floor in int4["floors"])
    assert int4["recovered"] is None or int4["recovered"]["value"] == 0  # it is rounding to nearest
    assert "14 layers int4, groups of 32" in int4["recovered_against"]
    assert "rows" not in int4 and len(written["candidates"][1]["rows"]) == said["protocol"]["windows"] == 6
    assert written["candidates"][1]["prompts"]["pairs"][0]["prompt"] == "What is 0 times 0?"
    answers = [json.loads(line) for line in (tmp_path / "gsm8k_original.jsonl").read_text().splitlines()]
    assert [line["gold"] for line in answers] == ["0", "2", "4", "6"] and said["original"]["gsm8k"]["questions"] == 4
    assert "recovered" in done.stdout and "floor, another program, module" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run=tiny", "agianst=tiny"], "agianst is not a key; did you mean against"),
        (["run=nowhere", "against=tiny"], "model=nowhere is no folder"),
        (["against=tiny"], "run is not set"),
    ],
)
def test_mistakes_are_answered(arguments, words):
    done = evaluate_script(*arguments)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_help_lists_every_key():
    done = evaluate_script("--help")
    assert done.returncode == 0 and all(f"{key} = " in done.stdout for key in EvaluationConfig.__dataclass_fields__)


def test_a_candidate_that_does_not_open_is_skipped_with_the_reason(material, rounded):
    report = evaluate(EvaluationConfig(run=f"{rounded}@transformers,tiny@module", against="tiny", **settings(material)))
    skipped, module = report["candidates"]
    assert "lowbit's own codes" in skipped["skipped"] and module["path"] == "module"
    assert [floor["how"] for floor in module["floors"]] == ["the candidate's program"]
    assert 0 < module["kl"]["value"] < 1e-6


def test_module_and_server_agree_on_codes(material, rounded):
    run = f"{rounded}@server,{rounded}@module"
    report = evaluate(EvaluationConfig(run=run, num_prompts=0, floors=False, **settings(material)))
    server, module = report["candidates"]
    assert server["kl"]["value"] == pytest.approx(module["kl"]["value"], rel=1e-2)
    assert report["original"]["model"] == "tiny"  # what quantize.json says
    assert "prompts" not in server and server["floors"] == []


def test_a_run_is_its_adapter_over_its_base(train, jsonl, tmp_path, material):
    """What is evaluated is what was trained: the adapter's answers, through the server and through PEFT."""
    train(
        *("conf=qlora", "model=tiny", "model.dtype=float32", "data=jsonl", f"data.path={jsonl}", "data.eval_rows=2"),
        *("train.max_steps=3", "optim.lr=0.02", "evaluate.samples=0", f"output_dir={tmp_path / 'run'}"),
    )
    run = tmp_path / "run"
    config = EvaluationConfig(run=f"{run}@server,{run}@module", num_prompts=0, floors=False, **settings(material))
    report = evaluate(config)
    server, module = report["candidates"]
    assert server["kind"] == "run: adapter over its base" and report["original"]["model"] == "tiny"
    assert server["kl"]["value"] > 1e-4 and server["kl"]["value"] == pytest.approx(module["kl"]["value"], rel=1e-2)
    assert "layers nf4" in server["recovered_against"]
