"""Exact resume: killed at any step, in any epoch, a run goes on with bit-identical losses."""

import json
import shutil
import signal
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._pytree import tree_leaves

from tests.e2e.conftest import command, environment, losses
from trainer import UserError, finetune, load_config

SETTINGS = (
    *("conf=qlora", "model=tiny", "data=jsonl", "data.eval_rows=4", "data.max_seq_len=64", "evaluate.samples=0"),
    *("train.max_steps=16", "train.batch_size=3", "train.grad_accum_steps=2", "train.save_every=3", "lora.dropout=0.2"),
    "train.log_row_ids=true",
)  # 36 rows, 6 a step: three epochs


def wait_for_step(run_dir, step, process):
    deadline = time.monotonic() + 600  # of a run that hangs; on a busy machine an import takes minutes
    while time.monotonic() < deadline and process.poll() is None:
        path = run_dir / "metrics.jsonl"
        if path.is_file() and len(path.read_text().splitlines()) >= step:
            return
        time.sleep(0.005)
    raise AssertionError(f"the run did not reach step {step}: {process.communicate()}")


@pytest.fixture
def here():
    """Runs in this process, for what needs no process to die; returns the run folder."""
    return lambda *overrides: finetune(load_config(*overrides)).run_dir


def start(tmp_path, *overrides):
    return subprocess.Popen(
        command(*overrides),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("optimizer", "steps"),
    [
        ("adamw", (1, 7, 14)),  # killed before the first checkpoint, then in the second epoch, then in the third
        ("adamw_8bit", (7,)),
    ],
)
def test_a_killed_run_resumes_bit_identical(tmp_path, here, jsonl, optimizer, steps):
    """Killed again and again, the run ends with the losses of one that was never touched."""
    settings = (*SETTINGS, f"data.path={jsonl}", f"optim.name={optimizer}", "lora.rank=64")
    whole = losses(here(*settings, f"output_dir={tmp_path / 'whole'}"))
    run_dir = tmp_path / "killed"
    for step in steps:
        overrides = (f"resume={run_dir}",) if step != steps[0] else (*settings, f"output_dir={run_dir}")
        process = start(tmp_path, *overrides)
        wait_for_step(run_dir, step, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert len(losses(run_dir)) < 16, "the run ended before the kill"
    here(f"resume={run_dir}")
    assert losses(run_dir) == whole
    assert (run_dir / "metrics.jsonl").read_text().count('"row_ids"') == 16
    state = torch.load(run_dir / "checkpoints" / "step_16" / "optimizer.pt", weights_only=True)["state"]
    tensors = [leaf for leaf in tree_leaves(state) if torch.is_tensor(leaf)]  # bitsandbytes nests its 8-bit state
    eight_bit = any(tensor.dtype is torch.uint8 for tensor in tensors)
    assert eight_bit == (optimizer == "adamw_8bit")  # bitsandbytes keeps tensors under 4096 values in float32


@pytest.mark.parametrize(
    "settings",
    [
        ("optim.name=lion", "optim.weight_decay=0.1"),
        ("optim.name=lion_8bit", "lora.rank=64"),  # tensors of 4096 values, below which bitsandbytes keeps float32
        ("optim.name=adamw_schedule_free", "optim.schedule=constant"),
        ("optim.schedule=wsd", "optim.layer_decay=0.7", "optim.lora_plus_ratio=4"),
        ("conf=full", "optim.name=muon", "optim.weight_decay=0.1", "optim.layer_decay=0.9"),
        ("preference.method=dpo", "preference.loss=ipo"),
        ("preference.method=kto", "data.columns.label=good", "preference.precompute=true"),
    ],
)
def test_a_run_that_lost_its_end_resumes_bit_identical(tmp_path, here, jsonl, settings):
    """Back to step 6, whose checkpoint was written between evaluations that a run to resume has seen as well."""
    full = "conf=full" in settings
    shared = [setting for setting in SETTINGS if not full or setting not in ("conf=qlora", "lora.dropout=0.2")]
    settings = (*shared, f"data.path={jsonl}", "train.eval_every=4", "train.keep_checkpoints=9", *settings)
    run_dir = here(*settings, f"output_dir={tmp_path / 'run'}")
    whole, results = losses(run_dir), [run_dir / "metrics.json", *run_dir.glob("export/*/*.safetensors")]
    contents = [measured(path) for path in results]
    assert len(results) == 2 and len(set(whole.values())) == 16
    for path in results:
        path.unlink()
    for path in (run_dir / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > 6:
            shutil.rmtree(path)
    here(f"resume={run_dir}")
    assert losses(run_dir) == whole
    assert [measured(path) for path in results] == contents


def measured(path):
    """A file's bytes, or of metrics.json the held-out losses."""
    if path.name != "metrics.json":
        return path.read_bytes()
    return [json.loads(path.read_text())[key] for key in ("eval_loss_base", "eval_loss")]


def test_a_schedule_free_run_is_judged_and_exported_at_its_average(tmp_path, here, jsonl):
    """Checkpoint, export and held-out losses are of the average; looking at it while training changes no loss."""
    settings = (*SETTINGS, f"data.path={jsonl}", "optim.name=adamw_schedule_free", "optim.schedule=constant")
    settings = (*settings, "optim.warmup_ratio=0")  # or half a run would have another warm-up than a whole one
    looked = here(*settings, "train.eval_every=1", "train.save_every=1", f"output_dir={tmp_path / 'looked'}")
    half = here(*settings, "train.max_steps=8", "train.save_every=0", f"output_dir={tmp_path / 'half'}")
    lines = [json.loads(line) for line in (looked / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"]: line["loss"] for line in lines[:8]} == losses(half)
    assert lines[7]["eval_loss"] == json.loads((half / "metrics.json").read_text())["eval_loss"]
    newest = looked / "checkpoints" / "step_16"
    points = torch.load(newest / "optimizer.pt", weights_only=True)["state"].values()
    averages = [point["y"].lerp(point["z"], 1 - 1 / 0.9) for point in points]  # y = 0.1 z + 0.9 x, solved for x
    exported = load_file(looked / "export" / "adapter" / "adapter_model.safetensors")
    for name, saved in load_file(newest / "trainable.safetensors").items():
        assert any(torch.equal(saved, average) for average in averages)
        assert not any(torch.equal(saved, point["y"]) for point in points)
        assert torch.equal(saved, exported[name.removeprefix("model.").replace(".default.", ".")])


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, here, jsonl):
    settings = (*SETTINGS, f"data.path={jsonl}", "train.save_every=0")
    whole = losses(here(*settings, f"output_dir={tmp_path / 'whole'}"))
    process = start(tmp_path, *settings, "output_dir=stopped")
    wait_for_step(tmp_path / "stopped", 2, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "python train.py resume=stopped" in output
    here(f"resume={tmp_path / 'stopped'}")
    assert losses(tmp_path / "stopped") == whole


def test_a_half_written_checkpoint_is_never_picked_up(tmp_path, here, jsonl):
    run_dir = here(*SETTINGS, f"data.path={jsonl}", "train.max_steps=6", f"output_dir={tmp_path / 'run'}")
    whole = losses(run_dir)
    newest = run_dir / "checkpoints" / "step_6"
    newest.rename(run_dir / "checkpoints" / ".step_6.partial")  # what a crash before the rename leaves
    (run_dir / "checkpoints" / ".step_6.partial" / "optimizer.pt").write_bytes(b"half")
    here(f"resume={run_dir}")
    assert losses(run_dir) == whole and (newest / "optimizer.pt").stat().st_size > 4


def test_checkpoints_are_pruned(tmp_path, here, jsonl):
    run_dir = here(*SETTINGS, f"data.path={jsonl}", "train.keep_checkpoints=2", f"output_dir={tmp_path / 'run'}")
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step_15", "step_16"]


def test_a_finished_run_can_be_lengthened(tmp_path, here, jsonl):
    run_dir = here(*SETTINGS, f"data.path={jsonl}", "train.max_steps=3", f"output_dir={tmp_path / 'run'}")
    first = losses(run_dir)
    here(f"resume={run_dir}", "train.max_steps=5")
    assert len(losses(run_dir)) == 5 and {step: losses(run_dir)[step] for step in first} == first


def test_a_run_cannot_end_before_its_checkpoint(tmp_path, here, jsonl):
    run_dir = here(*SETTINGS, f"data.path={jsonl}", "train.max_steps=4", f"output_dir={tmp_path / 'run'}")
    with pytest.raises(UserError, match="before the checkpoint's step 4"):
        here(f"resume={run_dir}", "train.max_steps=2")


def test_resume_refuses_other_data(tmp_path, here, jsonl):
    mine = tmp_path / "mine.jsonl"
    shutil.copy(jsonl, mine)
    run_dir = here(*SETTINGS, f"data.path={mine}", "train.max_steps=3", f"output_dir={tmp_path / 'run'}")
    mine.write_text(mine.read_text().replace("Add 3 and", "Sum 3 and"))
    with pytest.raises(UserError, match="the training or held-out data.* changed"):
        here(f"resume={run_dir}", "train.max_steps=5")


def test_two_processes_cannot_write_one_run(tmp_path, here, jsonl):
    run_dir = tmp_path / "run"
    process = start(tmp_path, *SETTINGS, f"data.path={jsonl}", "train.max_steps=2000", f"output_dir={run_dir}")
    wait_for_step(run_dir, 1, process)
    with pytest.raises(UserError, match="another process"):
        here(f"resume={run_dir}")
    process.kill()
    process.wait()
    here(f"resume={run_dir}", "train.max_steps=4")  # the lock of a killed process does not stay


def test_held_out_data_must_be_the_same_too(tmp_path, here, jsonl):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "Add 1 and 1", "completion": "2"}\n')
    settings = (*SETTINGS, f"data.path={jsonl}", f"data.eval_path={held_out}", "train.max_steps=2")
    run_dir = here(*settings, f"output_dir={tmp_path / 'run'}")
    held_out.write_text('{"prompt": "Add 1 and 1", "completion": "two"}\n')
    with pytest.raises(UserError, match="held-out data"):
        here(f"resume={run_dir}", "train.max_steps=3")


def test_moved_data_can_be_named(tmp_path, here, jsonl):
    mine = tmp_path / "mine.jsonl"
    shutil.copy(jsonl, mine)
    run_dir = here(*SETTINGS, f"data.path={mine}", "train.max_steps=2", f"output_dir={tmp_path / 'run'}")
    mine.rename(tmp_path / "moved.jsonl")
    here(f"resume={run_dir}", f"data.path={tmp_path / 'moved.jsonl'}", "train.max_steps=3")
    assert len(losses(run_dir)) == 3


def test_a_run_folder_is_not_written_over(tmp_path, here, jsonl):
    settings = (*SETTINGS, f"data.path={jsonl}", "train.max_steps=2", f"output_dir={tmp_path / 'run'}")
    here(*settings)
    with pytest.raises(UserError, match="holds a run already"):
        here(*settings)
