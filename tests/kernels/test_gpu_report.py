"""scripts/gpu_report.py without a GPU: every unit at tiny sizes, and what happens to units that fail."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
COLUMNS = {"work", "shape", "ours", "unit", "of_limit", "target", "met", "peer", "peer_name", "ratio", "note"}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("gpu_report")


@pytest.fixture
def bench(report: ModuleType) -> object:
    return report.Bench(torch.device("cpu"), quick=False, dry=False)


def run(*arguments: str, script: Path = SCRIPTS / "gpu_report.py") -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "LOWBIT_KERNELS"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, env=environment)


def test_without_a_gpu_it_says_what_it_needs() -> None:
    done = run()
    assert done.returncode == 2 and not done.stdout
    assert len(done.stderr.splitlines()) == 1 and "needs a GPU" in done.stderr and "--dry-run" in done.stderr


def test_unknown_unit() -> None:
    done = run("--dry-run", "--only", "nothing")
    assert done.returncode == 2 and "correct_nf4_fp4" in done.stderr


def test_dry_run_gives_a_whole_table(report: ModuleType, tmp_path: Path) -> None:
    """Imports, arguments, model building, both training contenders, the engine, torch.compile: all but the GPU."""
    done = run("--dry-run", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["unit_s"]) == set(report.UNITS)
    assert all(row["ours"] is not None and set(row) >= COLUMNS for row in found["rows"])
    works = {row["work"]: row for row in found["rows"]}
    assert works["nf4_dequantize"]["target"] == "of_limit >= 0.85"
    assert works["qlora_step"]["target"] == "ratio >= 1.5" and works["qlora_step_memory"]["target"] == "ratio <= 0.7"
    assert works["compile_fullgraph"]["met"] is True and works["engine_with_graphs"]["met"] is True
    assert json.loads((tmp_path / "gpu_report.json").read_text())["rows"] == found["rows"]
    table = (tmp_path / "gpu_report.md").read_text()
    assert table.strip() in done.stdout and all(f"| {work} |" in table for work in works)


def test_tuner_goes_through_the_launchers(tmp_path: Path) -> None:
    """In Triton's interpreter: a candidate reaches the launch, and its entry is named as the launch asks for it."""
    pytest.importorskip("triton")
    done = run("--tune", "--dry-run", "--only", "tune_int4_linear,tune_paged_decode_64", "--out", str(tmp_path))
    found = json.loads(done.stdout.splitlines()[-1])
    if all("no tiles" in row["note"] for row in found["rows"]):
        pytest.skip("the launchers have their tiles as constants")
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(found["tuned"]) == {"int4_linear itemsize=2", "paged_decode head_dim=16 int8=0 itemsize=2"}
    assert all("us, default" in entry["source"] for entry in found["tuned"].values())


UNITS_THAT_FAIL = """
import os, sys
sys.path.insert(0, {scripts!r})
import gpu_report
from gpu.bench import row_of

def raises(bench):
    yield row_of("before", ours=1.0)
    raise ValueError("as asked\\nand more")

def dies(bench):
    yield row_of("last words", ours=2.0)
    os._exit(9)

def works(bench):
    print("what a library prints")
    yield row_of("after", ours=3.0)

gpu_report.UNITS.clear()
gpu_report.UNITS.update(raises=raises, dies=dies, works=works)
gpu_report.main()
"""


def test_a_unit_that_fails_costs_only_itself(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(UNITS_THAT_FAIL.format(scripts=str(SCRIPTS)))
    done = run("--dry-run", script=script)
    assert done.returncode == 1, done.stderr
    rows = {row["work"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    assert {name: row["ours"] for name, row in rows.items()} == {
        "before": 1.0, "raises": None, "last words": 2.0, "dies": None, "after": 3.0,
    }  # fmt: skip
    assert rows["raises"]["note"] == "ValueError: as asked" and "ended with 9" in rows["dies"]["note"]


def test_a_child_that_hangs_is_ended(report: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "UNIT_LIMIT_S", 2)
    child = report.Child([sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ))
    assert list(child.messages()) == []
    assert child.end.startswith("no answer within 2 s")
    child._process.wait()  # it was ended: this would take ten minutes


def test_units_left_when_time_is_over(report: ModuleType) -> None:
    done = run("--dry-run", "--only", "correct_swiglu,correct_rope", "--budget-s", "0")
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert done.returncode == 1 and [row["work"] for row in rows] == ["correct_rope", "correct_swiglu"]
    assert all("not run" in row["note"] for row in rows)


class TestRows:
    def test_targets(self, report: ModuleType) -> None:
        bench = importlib.import_module("gpu.bench")
        row = bench.row_of("x", ours=1.0, of_limit=0.8)
        fast, slow = bench.Target("of_limit", 0.7), bench.Target("of_limit", 0.9)
        ahead = bench.Target("ratio", 1)
        assert bench.judged(row, fast)["met"] is True and bench.judged(row, slow)["met"] is False
        assert bench.judged(row, fast, ahead)["met"] is True  # no peer here: what can be judged is
        assert bench.judged(row, ahead)["met"] is None and bench.judged(row)["target"] is None
        assert bench.judged({**row, "ratio": 0.9}, fast, ahead)["met"] is False
        memory = bench.judged({**row, "ratio": 0.6}, bench.Target("ratio", 0.7, at_least=False))
        assert memory["met"] is True and memory["target"] == "ratio <= 0.7"

    def test_speed_counts_the_longer_limit(self, report: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        bench = importlib.import_module("gpu.bench")
        monkeypatch.setattr(bench, "seconds", lambda bench, function, **_: [function()] * 3)
        limits = bench.Limits(copy=1e9, bfloat16=1e12, int8=2e12)
        machine = bench.Bench(torch.device("cpu"), False, False, limits)
        # 1e9 bytes take 1 s, 4e12 operations 4 s (2 s in int8); ours takes 8 s, the peer 16 s
        work = {"moved": 1e9, "operations": 4e12}
        (row,) = bench.speed(machine, "x", "", lambda: 8.0, {"peer": lambda: 16.0}, **work)
        assert (row["ours"], row["unit"], row["of_limit"], row["ratio"]) == (0.5, "TFLOP/s", 0.5, 2.0)
        (row,) = bench.speed(machine, "x", "", lambda: 8.0, rate=torch.int8, **work)
        assert row["of_limit"] == 0.25
        (row,) = bench.speed(machine, "x", "", lambda: 8.0, moved=1e9)
        assert (row["ours"], row["unit"], row["of_limit"]) == (0.125, "GB/s", 0.125)

    def test_a_peer_that_fails_leaves_our_row(self, report: ModuleType) -> None:
        bench = importlib.import_module("gpu.bench")
        machine = bench.Bench(torch.device("cpu"), False, True, bench.Limits(1, 1, 1))

        def fails() -> None:
            raise RuntimeError("no kernel image")

        (row,) = bench.speed(machine, "x", "", lambda: None, {"peer": fails}, moved=1)
        assert row["ours"] > 0 and row["peer"] is None and row["note"] == "peer: RuntimeError: no kernel image"

    def test_markdown_keeps_a_row_on_a_line(self, report: ModuleType) -> None:
        bench = importlib.import_module("gpu.bench")
        row = bench.failed("x", "a | b\nc")
        text = report.markdown({"machine": "m", "versions": {"torch": "2"}, "limits": None, "rows": [row]})
        assert text.splitlines()[-1].count("|") == 12 and "a / b c" in text


class TestCheck:
    """A check must see what it is there for."""

    @staticmethod
    def result(bench: object, wrong: float, *, exact: bool) -> dict:
        correct = importlib.import_module("gpu.correct")

        def build(bench: object, dtype: torch.dtype) -> object:
            def function() -> tuple[torch.Tensor]:
                reference = os.environ["LOWBIT_KERNELS"] == "reference"
                return (torch.ones(100) * (1 if reference else 1 + wrong),)

            return function

        (row,) = correct.check("x", build, exact=exact, bench=bench)
        return row

    @pytest.mark.parametrize(
        ("wrong", "exact", "met"),
        [(0, True, True), (0, False, True), (1e-6, True, False), (1e-5, False, True), (1e-3, False, False)],
    )
    def test_difference(self, bench: object, wrong: float, exact: bool, met: bool) -> None:
        """float32 may be off by 1e-4, and bits that must agree by nothing"""
        assert self.result(bench, wrong, exact=exact)["met"] is met

    def test_nan(self, bench: object) -> None:
        assert self.result(bench, float("nan"), exact=False)["met"] is False

    def test_environment_is_left_as_it_was(self, bench: object, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOWBIT_KERNELS", "cpu")
        self.result(bench, 0, exact=True)
        assert os.environ["LOWBIT_KERNELS"] == "cpu"


def test_random_models_of_both_contenders_have_the_same_weights(report: ModuleType) -> None:
    """One seed, one order: first losses are compared, and a difference must come from the arithmetic."""
    models = importlib.import_module("gpu.models")
    bench = report.Bench(torch.device("cpu"), quick=False, dry=True)
    seen: Iterator[list[torch.Tensor]] = ([], [])
    for kept in seen:
        models.random_model(bench, models.SIZES_DRY, lambda layer, kept=kept: kept.extend(layer.parameters()))
    assert len(seen[0]) == 18 and all(torch.equal(a, b) for a, b in zip(*seen, strict=True))  # 2 layers of 7 + 2 norms


CHECKS_INTERPRETED = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from gpu import bench, correct

tiny = bench.Bench(torch.device("cpu"), quick=False, dry=True)
for name, (build, exact) in correct.CHECKS.items():
    with correct.kernels("reference"):
        function = build(tiny, torch.float32)
        want = function()
    with correct.kernels("triton"):
        got = function()
    error = max(bench.distance(a, b) for a, b in zip(got, want, strict=True))
    assert error <= (0 if exact else bench.TOLERANCE[torch.float32]), (name, error)
print("interpreted")
"""


def test_checks_reach_triton_and_agree() -> None:
    """What a GPU will run first, in Triton's interpreter: arguments, launches and tolerances of every check."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", CHECKS_INTERPRETED, str(SCRIPTS)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.stdout == "interpreted\n", result.stderr[-3000:]
