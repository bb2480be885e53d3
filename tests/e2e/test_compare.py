"""A sweep, its runs side by side, and a report made anew: a user's commands, in subprocesses."""

import json
import subprocess
import sys

import pytest

from tests.e2e.conftest import ROOT, environment

TINY = (
    "model=tiny",
    "data=jsonl",
    "data.format=prompt_completion",
    "data.eval_rows=4",
    "evaluate.samples=0",
    "train.max_steps=3",
)


@pytest.fixture
def sweep(train, tmp_path, jsonl):
    """Two jobs of a sweep, tracked offline."""
    train("--multirun", "conf=qlora", *TINY, f"data.path={jsonl}", "seed=1,2", "tracker=wandb")
    return next((tmp_path / "outputs" / "qlora").iterdir())


def script(name: str, *arguments: str, cwd, code: int = 0) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / name), *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done


def test_a_sweep_is_grouped_reported_and_compared(sweep, tmp_path):
    runs = [sweep / "0", sweep / "1"]
    for run in runs:
        page = (run / "report.html").read_text()
        assert "3 steps over" in page and "seed=" in json.loads((run / "sessions.jsonl").read_text())["command"]
        (tracked,) = run.glob("wandb/offline-run-*/*.wandb")
        assert f"qlora/{sweep.name}".encode() in tracked.read_bytes()  # the group
        assert f"report-{(run / 'wandb_id.txt').read_text().strip()}".encode() in tracked.read_bytes()

    done = script("compare.py", *map(str, sweep.iterdir()), "html=side.html", cwd=tmp_path)
    line = json.loads(done.stdout.splitlines()[-1])
    assert "settings that differ" in done.stdout
    assert sorted(run["settings"]["seed"] for run in line["runs"]) == [1, 2]
    finals = {run["name"]: run["figures"]["loss, nats a target token, tuned"] for run in line["runs"]}
    assert finals == {run.name: json.loads((run / "metrics.json").read_text())["eval_loss"] for run in runs}
    assert "training loss" in (tmp_path / "side.html").read_text()

    (runs[0] / "report.html").unlink()
    line = json.loads(script("report.py", f"run={runs[0]}", "plots=false", cwd=tmp_path).stdout.splitlines()[-1])
    assert (runs[0] / "report.html").read_text().startswith("<!doctype html>") and line["plots"] == []


def test_mistakes_are_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    for name, arguments, words in (
        ("compare.py", ["empty", "nothing"], "no run folder"),
        ("compare.py", ["empty", "html=no/where.html"], "its folder does not exist"),
        ("report.py", ["run=empty"], "no run folder"),
        ("report.py", [], "run is not set"),
    ):
        done = script(name, *arguments, cwd=tmp_path, code=2)
        assert words in done.stderr and len(done.stderr.strip().splitlines()) == 1
