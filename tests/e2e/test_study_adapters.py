"""scripts/study_adapters.py: a quick study from the first cell to the document, and what becomes of faults."""

import importlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import ModuleType

import pytest

from tests.e2e.conftest import ROOT

SCRIPT = ROOT / "scripts" / "study_adapters.py"
TRAINED = {"start_loss", "losses", "loss", "perplexity", "right", "questions", "setup_s", "tokens_per_s"}
ALWAYS = {"date", "machine", "versions", "hash", "overrides", "cell_s", "threads"}


def study(*arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


def records_of(work: Path) -> list[dict]:
    return [json.loads(line) for line in (work / "results.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of a quick study: every cell, two of the costs and the long ones."""
    folder = tmp_path_factory.mktemp("study")
    done = study("--quick", "--work", folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    done = study("--quick", "--work", folder, "--only", "cost_qlora_nf4,cost_loftq5_nf2,long")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The script and the modules of study/, by name."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    names = ("study_adapters", "study.adapters.cells", "study.records", "study.runner", "study.adapters.results")
    names += ("study.adapters.findings",)
    return {name: importlib.import_module(name) for name in names}


def test_every_cell_has_all_its_figures(work: Path, modules: dict[str, ModuleType]) -> None:
    records = records_of(work)
    cells = modules["study.adapters.cells"]
    assert len(records) == len(cells.study_cells(cells.QUICK)) + 4
    assert all(record.keys() >= ALWAYS and "error" not in record for record in records)
    trained = [record for record in records if record["kind"] == "trained"]
    assert {(r["name"], r["seed"]) for r in trained} == {(n, s) for n in cells.methods(cells.QUICK) for s in (0, 1)}
    for record in trained:
        assert record.keys() >= TRAINED and len(record["losses"]) == record["sizes"]["steps"]
        assert math.isfinite(record["loss"]) and record["perplexity"] > 1
        assert record["questions"] == len(record["answers"]) == record["sizes"]["questions"]
        assert ("layer_errors" in record) == (record["seed"] == 0)
    costs = [record for record in records if record["kind"] == "cost"]
    assert all(len(record["step_s"]) == record["sizes"]["cost_steps"] - 1 for record in costs)
    curves = [record["curve"] for record in records if record["kind"] == "long"]
    assert len(curves) == 2 and all([step for step, _ in curve] == list(range(9)) for curve in curves)
    assert not list((work / "runs").iterdir())  # checkpoints of 51 runs would fill a disk


def test_starts_are_measured_from_the_modules(work: Path) -> None:
    """LoftQ's error falls and does not depend on alpha; without s in the factors it is plain QLoRA's at alpha = 2r."""
    starts = {record["name"]: record["points"] for record in records_of(work) if record["kind"] == "start"}
    for codebook in ("nf4", "nf3", "nf2"):
        plain = starts[f"start_{codebook}_plain"][0]["layer_errors"]
        mean = sum(plain.values()) / len(plain)
        points = {point["alpha"]: point for point in starts[f"start_{codebook}_loftq1"]}
        assert sorted(points) == [8, 16, 32, 64]
        for point in points.values():
            assert point["layer_errors"].keys() == plain.keys()
            assert all(error < 0.9 * plain[name] for name, error in point["layer_errors"].items())
            # sqrt(s) is no power of two at half of the alphas: float32's rounding, 6e-8, of factors and their product
            assert point["layer_errors"] == pytest.approx(points[16]["layer_errors"], rel=1e-6)
        # (1 - s)^2 = 1 at s = 2, in the mean of 14 layers; the same rounding
        assert points[32]["unscaled_mean_error"] == pytest.approx(mean, rel=1e-6)
        assert points[64]["unscaled_mean_error"] > 1.5 * mean
    assert set(starts["start_16bit"][0]["layer_errors"].values()) == {0.0}


def test_starts_with_the_adapter_on(work: Path) -> None:
    """PiSSA and LoftQ start from another function than plain QLoRA, EVA and DoRA from its own."""
    first = {r["name"]: r["start_loss"] for r in records_of(work) if r["kind"] == "trained" and r["seed"] == 0}
    assert first["eva_nf4"] == first["rslora_nf4"] == first["qlora_nf4"]  # B = 0
    assert first["dora_nf4"] == pytest.approx(first["qlora_nf4"], abs=1e-3)  # rows rescaled by a rounded 1
    assert len({first[name] for name in ("qlora_nf4", "pissa_nf4", "loftq1_nf4", "loftq5_nf4")}) == 4


def test_done_cells_are_skipped_and_a_cut_line_is_measured_again(work: Path, tmp_path: Path) -> None:
    lines = (work / "results.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"qlora_nf2"' in line]
    (tmp_path / "results.jsonl").write_text(kept[0] + kept[1][:100])  # killed while it wrote
    done = study("--quick", "--work", tmp_path, "--only", "qlora_nf2")
    assert done.returncode == 0 and "2 cells, 1 measured before" in done.stdout
    done = study("--quick", "--work", tmp_path, "--only", "qlora_nf2")
    assert "2 cells, 2 measured before" in done.stdout and "[1/" not in done.stdout


def test_report(work: Path, tmp_path: Path) -> None:
    """Each table under its command; text by hand stays; plots are small and hold their words as text."""
    pytest.importorskip("matplotlib", reason="the plots need matplotlib: pip install 'lowbit[bench]'")
    report = ("--quick", "--work", work, "--report", "--docs", tmp_path)
    done = study(*report)
    assert done.returncode == 0, done.stderr[-3000:]
    path = tmp_path / "quality_adapters.md"
    text = path.read_text()
    for heading in (
        "After training",
        "Before training",
        "With more steps",
        "Costs",
        "Bars",
        "The papers and these figures",
    ):
        assert f"\n## {heading}\n" in text
    blocks = text.split("\n\n")
    tables = [index for index, block in enumerate(blocks) if block.startswith("| ") and "| figures |" not in block]
    assert len(tables) == 6
    assert all(any(b.startswith("`python scripts/") for b in blocks[index - 3 : index]) for index in tables)
    assert "Not measured" not in text and "Failed" not in text and "nan" not in text
    assert (
        text.count("| yes |") + text.count("| **no** |") == 6 + 2 + 4 + 6 + 6
    )  # starts, other bars, formats, LoftQ, relatives
    for name in ("adapters_loss.svg", "adapters_error.svg"):
        plot = (tmp_path / "plots" / name).read_text()
        assert f"(plots/{name})" in text and "LoftQ T=5" in plot and len(plot) < 50_000
    path.write_text(text + "\nWhy INT4 does well here: by hand.\n")
    assert study(*report).returncode == 0
    assert path.read_text() == text + "\nWhy INT4 does well here: by hand.\n"


def test_a_cell_that_fails_is_recorded_and_the_rest_goes_on(
    tmp_path: Path, modules: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    script, cells = modules["study_adapters"], modules["study.adapters.cells"]
    good = cells.chosen_cells(cells.QUICK, "cost_qlora_nf4")[0]
    bad = replace(good, name="bad", overrides=("conf=qlora", "lora.rank=0"))
    data = tmp_path / "data"
    data.mkdir()
    script.make_data(data)
    records = modules["study.records"].Records(tmp_path / "results.jsonl")
    run = modules["study.runner"].Runner(SCRIPT, records, data, tmp_path, jobs=1, say=script.say)
    run.run([bad, good], per_process=2)
    assert run.num_failed == 1
    assert [(record["name"], "error" in record) for record in records_of(tmp_path)] == [
        ("bad", True),
        (good.name, False),
    ]
    assert "lora.rank=0; give at least 1" in records_of(tmp_path)[0]["error"]
    assert "bad seed 0 FAILED" in capsys.readouterr().out
    records = modules["study.records"].Records(tmp_path / "results.jsonl")  # as the next call finds them
    assert not records.has(bad) and records.has(good)
    assert [record["name"] for record in records.failures([bad, good])] == ["bad"]


def test_faults_of_the_command_line(tmp_path: Path) -> None:
    done = study("--data", tmp_path, "--work", tmp_path)
    assert done.returncode == 2 and "has no gsm8k_train.jsonl; it is github.com/openai" in done.stderr
    done = study("--quick", "--only", "qlora,nothing", "--work", tmp_path)
    assert done.returncode == 2 and "no cell begins with nothing" in done.stderr and "loftq5c_nf2" in done.stderr
    done = study("--report", "--work", tmp_path)
    assert done.returncode == 2 and "has no results of this study; run python scripts/study_adapters.py" in done.stderr


def test_settings_alone_decide_what_a_cell_is(modules: dict[str, ModuleType]) -> None:
    cells = modules["study.adapters.cells"]
    first = {cell.name: cell for cell in cells.study_cells(cells.FULL)}
    longer = {cell.name: cell for cell in cells.study_cells(replace(cells.FULL, steps=30))}
    assert first["qlora_nf4"].key != longer["qlora_nf4"].key and first["start_16bit"].key == longer["start_16bit"].key
    assert all("/" not in json.dumps(cell.to_dict()) for cell in first.values())
    assert all(cells.Cell.from_dict(json.loads(json.dumps(cell.to_dict()))).key == cell.key for cell in first.values())


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16 - 3 - 4 = <<16-3-4=9>>9 eggs\n#### 18", 18),
        ("#### $1,080.50 in all", Decimal("1080.5")),
        ("#### -5", -5),
        ("#### 18\n#### 20", 20),  # the last one is its answer
        ("so 16-3 is 13 #### ", 13),  # nothing after the mark
        ("first 4, then 7.", 7),
        ("16-3", 3),  # a difference, not a sign
        ("none", None),
    ],
)
def test_number_of_an_answer(monkeypatch: pytest.MonkeyPatch, text: str, number: Decimal | None) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    measure = importlib.import_module("study.adapters.measure")
    assert measure.final_number(text) == number
    assert measure.is_right(text, f"#### {number}") == (number is not None)


def test_wilson(modules: dict[str, ModuleType]) -> None:
    """8 of 10: (0.4902, 0.9433), Agresti and Coull 1998's formula by hand; no answers right still has a width."""
    assert modules["study.records"].wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=5e-5)
    low, high = modules["study.records"].wilson(0, 192)
    assert low == pytest.approx(0, abs=1e-12) and high == pytest.approx(1.96**2 / (192 + 1.96**2), rel=1e-9)


@pytest.mark.parametrize(("gain", "reached"), [(0.05, True), (0.02, False), (-0.05, False)])
def test_the_bar_counts_deviations(modules: dict[str, ModuleType], gain: float, reached: bool) -> None:
    """Losses 1 -+ 0.01 have a deviation of 0.01, a difference of two such runs one of 0.0141."""
    results = object.__new__(modules["study.adapters.results"].Results)
    results.starts = {}
    results.trained = {
        "qlora_nf2": [{"loss": loss} for loss in (0.99, 1.0, 1.01)],
        "loftq5_nf2": [{"loss": loss - gain} for loss in (0.99, 1.0, 1.01)],
    }
    (claim, figures, holds) = modules["study.adapters.findings"].bars(results)[0]
    assert holds is reached and "2 bits" in claim and "deviation of the difference 0.0141" in figures


@pytest.mark.parametrize(("after", "reached"), [((90, 90, 90, 99.9), True), ((90, 90, 90, 100.1), False)])
def test_the_bar_wants_every_alpha(modules: dict[str, ModuleType], after: tuple[float, ...], reached: bool) -> None:
    results = object.__new__(modules["study.adapters.results"].Results)
    results.trained = {}
    results.starts = {
        "start_nf2_plain": [{"perplexity": 100.0}],
        "start_nf2_loftq5": [{"perplexity": perplexity} for perplexity in after],
    }
    assert [holds for _, _, holds in modules["study.adapters.findings"].bars(results)] == [reached]
