"""Exact resume: killed at any step, in any epoch, a run goes on with bit-identical losses."""

import shutil
import signal
import subprocess
import time

import pytest

from tests.e2e.conftest import command, environment, losses

SETTINGS = (
    *("conf=qlora", "model=tiny", "data=jsonl", "data.eval_rows=4", "data.max_seq_len=64", "evaluate.samples=0"),
    *("train.max_steps=16", "train.batch_size=3", "train.grad_accum_steps=2", "train.save_every=3", "lora.dropout=0.2"),
    "train.log_row_ids=true",
)  # 36 rows, 6 a step: three epochs


def wait_for_step(run_dir, step, process):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        path = run_dir / "metrics.jsonl"
        if path.is_file() and len(path.read_text().splitlines()) >= step:
            return
        time.sleep(0.005)
    raise AssertionError(f"the run did not reach step {step}: {process.communicate()}")


def start(tmp_path, *overrides):
    return subprocess.Popen(
        command(*overrides), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_killed_runs_resume_bit_identical(tmp_path, train, jsonl, optimizer):
    settings = (*SETTINGS, f"data.path={jsonl}", f"optim.name={optimizer}")
    train(*settings, "output_dir=whole")
    whole = losses(tmp_path / "whole")
    for step in (1, 7, 14):  # before the first checkpoint, in the second epoch, in the third
        run_dir = tmp_path / f"killed_{step}"
        process = start(tmp_path, *settings, f"output_dir={run_dir}")
        wait_for_step(run_dir, step, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        train(f"resume={run_dir}")
        assert losses(run_dir) == whole
        assert (run_dir / "metrics.jsonl").read_text().count('"row_ids"') == 16


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, train, jsonl):
    settings = (*SETTINGS, f"data.path={jsonl}", "train.save_every=0")
    train(*settings, "output_dir=whole")
    process = start(tmp_path, *settings, "output_dir=stopped")
    wait_for_step(tmp_path / "stopped", 2, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "python train.py resume=stopped" in output
    train("resume=stopped")
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def test_a_half_written_checkpoint_is_never_picked_up(tmp_path, train, jsonl):
    settings = (*SETTINGS, f"data.path={jsonl}", "train.max_steps=6")
    train(*settings, "output_dir=run")
    run_dir = tmp_path / "run"
    whole = losses(run_dir)
    newest = run_dir / "checkpoints" / "step_6"
    newest.rename(run_dir / "checkpoints" / ".step_6.partial")  # what a crash before the rename leaves
    (run_dir / "checkpoints" / ".step_6.partial" / "optimizer.pt").write_bytes(b"half")
    train("resume=run")
    assert losses(run_dir) == whole and (newest / "optimizer.pt").stat().st_size > 4


def test_checkpoints_are_pruned(tmp_path, train, jsonl):
    train(*SETTINGS, f"data.path={jsonl}", "train.keep_checkpoints=2", "output_dir=run")
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step_15", "step_16"]


def test_resume_refuses_other_data(tmp_path, train, jsonl):
    mine = tmp_path / "mine.jsonl"
    shutil.copy(jsonl, mine)
    train(*SETTINGS, f"data.path={mine}", "train.max_steps=3", "output_dir=run")
    mine.write_text(mine.read_text().replace("Add 3 and", "Sum 3 and"))
    done = train("resume=run", "train.max_steps=5", check=False)
    assert done.returncode == 2 and "training data" in done.stderr and "Traceback" not in done.stderr


def test_a_run_folder_is_not_written_over(tmp_path, train, jsonl):
    train(*SETTINGS, f"data.path={jsonl}", "train.max_steps=2", "output_dir=run")
    done = train(*SETTINGS, f"data.path={jsonl}", "output_dir=run", check=False)
    assert done.returncode == 2 and "holds a run already" in done.stderr
