"""A user's commands, in subprocesses."""

import json
import re

import pytest

from tests.e2e.conftest import ROOT
from trainer.compose import recipes

TINY = ("model=tiny", "data=jsonl", "data.eval_rows=4", "evaluate.max_new_tokens=4", "train.max_steps=3")


@pytest.mark.parametrize("recipe", sorted(recipes()))
def test_every_recipe_runs_and_leaves_a_whole_folder(train, tmp_path, jsonl, recipe):
    labels = ("data.columns.label=good",) if recipe == "kto" else ()
    done = train(f"conf={recipe}", *TINY, f"data.path={jsonl}", *labels, "tracker=wandb")
    (run_dir,) = (tmp_path / "outputs" / recipe).iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", run_dir.name)
    export = {"full": "export/merged", "qat": "export/quantized", "qat_blocks": "export/quantized"}.get(
        recipe, "export/adapter"
    )
    for name in ("config.yaml", "metrics.jsonl", "metrics.json", "train.log", "checkpoints/step_3", export):
        assert (run_dir / name).exists(), name
    assert list((run_dir / "wandb").glob("offline-run-*"))
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert {"loss", "lr", "tokens", "tokens_per_s", "peak_memory_bytes"} <= steps[0].keys()
    measured = "margin" if recipe in ("dpo", "orpo", "kto") else "perplexity"
    assert "held-out" in done.stdout and measured in done.stdout and "Traceback" not in done.stdout + done.stderr


def test_a_sweep_is_a_folder_a_job(train, tmp_path, jsonl):
    train(
        "--multirun", "conf=qlora", *TINY, f"data.path={jsonl}", "seed=1,2", "train.max_steps=1", "evaluate.samples=0"
    )
    (sweep,) = (tmp_path / "outputs" / "qlora").iterdir()
    assert sorted(path.name for path in sweep.iterdir() if path.is_dir()) == ["0", "1"]
    losses = {json.loads((sweep / job / "metrics.jsonl").read_text())["loss"] for job in ("0", "1")}
    assert len(losses) == 2


def test_without_arguments_the_recipes_are_listed(train):
    done = train(check=False)
    assert done.returncode == 2
    assert all(f"conf={name}" in done.stdout for name in recipes())


def test_help_is_for_people(train):
    text = train("--help").stdout
    assert "quant.codebook = nf4" in text and "smollm2_135m" in text and "resume=latest" in text


def test_a_mistake_is_one_line_and_leaves_nothing(train, tmp_path):
    done = train("conf=qlora", "lora.rnak=4", check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: lora.rnak is not a key; did you mean lora.rank?"
    assert not (tmp_path / "outputs").exists()


def test_a_bad_row_is_named_and_leaves_nothing(train, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 3 + '{"prompt": "a", "completion"\n')
    done = train("conf=qlora", *TINY, f"data.path={path}", "output_dir=run", check=False)
    assert done.returncode == 2 and f"{path}:4" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()  # so that the mended command can be repeated as it is


def test_python_m_trainer_is_the_same_command(tmp_path):
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "trainer", "conf=nothing"], cwd=tmp_path, capture_output=True, text=True
    )
    options = f"Available options in 'conf': {' '.join(recipes())}"
    assert done.returncode == 2 and options in " ".join(done.stderr.split())


GSM8K = ROOT.parent / "shared" / "data" / "gsm8k_train.jsonl"


@pytest.mark.skipif(not GSM8K.is_file(), reason="../shared/data/gsm8k_train.jsonl is not beside the checkout")
def test_gsm8k_by_column_names(train, tmp_path):
    columns = ("data.columns.prompt=question", "data.columns.completion=answer")
    done = train(
        *("conf=qlora", "model=tiny", "data=jsonl", f"data.path={GSM8K}", *columns, "data.max_rows=200"),
        *("data.max_seq_len=700", "data.eval_rows=8", "train.max_steps=4", "evaluate.samples=0", "output_dir=run"),
    )
    assert "question -> prompt, answer -> completion" in done.stdout
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["eval_loss"] < metrics["eval_loss_base"]
