import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.conftest import SETTINGS, losses
from trainer.checkpoint import checkpoints
from trainer.config.errors import UserError
from trainer.loop import TrainingDiverged
from trainer.objective import NextTokenLoss

ROOT = Path(__file__).parent.parent.parent


def trained(result) -> dict[str, torch.Tensor]:
    return load_file(checkpoints(result.run_dir)[-1] / "trainable.safetensors")


def relative_error(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    difference = sum((one[name] - other[name]).norm() ** 2 for name in one) ** 0.5
    return float(difference / sum(tensor.norm() ** 2 for tensor in one.values()) ** 0.5)


def test_accumulated_steps_equal_the_large_batch(run):
    """The contract is 1e-6 on the loss; the weights follow through three optimizer steps, which divide by sqrt(v)."""
    large = run("large", "train.max_steps=3", "train.batch_size=6")
    small = run("small", "train.max_steps=3", "train.batch_size=2", "train.grad_accum_steps=3")
    assert losses(small.run_dir) == pytest.approx(losses(large.run_dir), rel=1e-6)
    assert relative_error(trained(large), trained(small)) < 1e-4


def test_passes_of_similar_length_change_nothing(run):
    """Grouping is about padding: 6 rows in one pass, and in passes of at most 60 tokens, take the same steps."""
    one = run("one", "train.max_steps=3", "train.batch_size=6", "train.max_pass_tokens=100000")
    many = run("many", "train.max_steps=3", "train.batch_size=6", "train.max_pass_tokens=60")
    assert losses(many.run_dir) == pytest.approx(losses(one.run_dir), rel=1e-6)
    assert relative_error(trained(one), trained(many)) < 1e-4


def test_two_processes_equal_one(run, tmp_path, uneven_jsonl):
    one = run("one", "train.max_steps=3", "train.batch_size=4")
    settings = (*SETTINGS, f"data.path={uneven_jsonl}", "train.max_steps=3")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launch, str(ROOT / "train.py"), *settings, "train.batch_size=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (two,) = tmp_path.glob("outputs/qlora/*")  # one folder, whatever the processes' clocks say
    assert losses(two) == pytest.approx(losses(one.run_dir), rel=1e-6)
    metrics = json.loads((two / "metrics.json").read_text())
    assert metrics["eval_loss"] == pytest.approx(one.metrics["eval_loss"], rel=1e-6)
    assert metrics["tokens"] == one.metrics["tokens"]
    resume = [*launch, str(ROOT / "train.py"), f"resume={two}", "train.max_steps=4"]
    done = subprocess.run(resume, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and len(losses(two)) == 4, done.stdout + done.stderr


def test_gradient_checkpointing_changes_nothing(run):
    plain = run("plain", "train.max_steps=3")
    recomputed = run("recomputed", "train.max_steps=3", "train.gradient_checkpointing=true")
    assert losses(recomputed.run_dir) == losses(plain.run_dir)
    assert all(torch.equal(a, b) for a, b in zip(trained(plain).values(), trained(recomputed).values(), strict=True))


def test_training_lowers_the_held_out_loss(run):
    result = run("run", "train.max_steps=30", "optim.lr=0.01")
    # a random byte model starts near ln(260) = 5.56; that answers are digits is worth half a nat in 30 steps
    assert result.metrics["eval_loss"] < result.metrics["eval_loss_base"] - 0.5


def test_rows_longer_than_the_model_reaches_are_refused(run, tmp_path):
    with pytest.raises(UserError, match="data.max_seq_len=9999 exceeds the model's 2048 positions"):
        run("run", "data.max_seq_len=9999")
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_divergence_stops_with_step_and_rows(run, tmp_path):
    with pytest.raises(TrainingDiverged, match=r"step \d+: loss .*Rows \[.*uneven\.jsonl:\d+.*optim\.lr"):
        run("run", "train.max_steps=20", "optim.lr=1e30", "train.save_every=1", "optim.warmup_ratio=0")
    assert not (tmp_path / "run" / "export").exists()


def test_a_loss_that_is_not_finite_changes_no_weight(run, tmp_path, monkeypatch):
    """Step 3 breaks: the checkpoint of step 2 is the newest, and holds what an unbroken run holds there."""
    whole = run("whole", "train.max_steps=2", "optim.schedule=constant", "optim.warmup_ratio=0")
    forward, calls = NextTokenLoss.forward, []

    def broken(self, **batch):
        loss = forward(self, **batch)
        calls.append(self.training)
        return loss * (float("nan") if sum(calls) == 3 else 1.0)

    monkeypatch.setattr(NextTokenLoss, "forward", broken)
    settings = ("train.max_steps=9", "train.save_every=1", "optim.schedule=constant", "optim.warmup_ratio=0")
    with pytest.raises(TrainingDiverged, match="step 3: loss nan.*no weight was changed"):
        run("broken", *settings)
    newest = checkpoints(tmp_path / "broken")[-1]
    assert newest.name == "step_2"
    saved, expected = load_file(newest / "trainable.safetensors"), trained(whole)
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


def test_divergence_in_the_last_step_is_no_success(run, tmp_path):
    with pytest.raises(TrainingDiverged, match="held-out loss after step 1"):
        run("run", "train.max_steps=1", "optim.lr=1e30", "optim.warmup_ratio=0")
    assert not (tmp_path / "run" / "export").exists()


def test_evaluation_in_between_is_logged_and_changes_nothing(run):
    without = run("without", "train.max_steps=6")
    between = run("between", "train.max_steps=6", "train.eval_every=2")
    lines = [json.loads(line) for line in (between.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4]
    assert losses(between.run_dir) == losses(without.run_dir)


def test_final_figures(run):
    metrics = run("run", "train.max_steps=2").metrics
    assert metrics["steps"] == 2 and metrics["tokens"] > 0 and metrics["peak_memory_bytes"] > 1 << 20
    assert metrics["perplexity"] == pytest.approx(torch.tensor(metrics["eval_loss"]).double().exp().item())
