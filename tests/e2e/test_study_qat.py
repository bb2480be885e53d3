"""scripts/study_qat.py: a quick study from the first cell to the document."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.e2e.conftest import ROOT

SCRIPT = ROOT / "scripts" / "study_qat.py"
CELLS = "rounded_16bit,rounded_g32,rounded_nf4,qad_g32,lora_g32,naive_g32,blocks_g32,cost_qat_g32,cost_full"


def study(*arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of a cell of every kind."""
    folder = tmp_path_factory.mktemp("study")
    done = study("--quick", "--work", folder, "--only", CELLS, "--jobs", "1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The modules of study/, by name."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    names = ("study.records", "study.qat.cells", "study.qat.report")
    return {name: importlib.import_module(name) for name in names}


def test_every_cell_has_its_figures(work: Path) -> None:
    records = [json.loads(line) for line in (work / "results.jsonl").read_text().splitlines()]
    assert not [record for record in records if "error" in record]
    found = {(record["name"], record["seed"]): record for record in records}
    exact = found["rounded_16bit", 0]
    assert exact["kl"] == 0 and exact["same_token"] == 1
    for name in ("rounded_g32", "rounded_nf4", "qad_g32", "lora_g32", "blocks_g32"):
        assert 0 < found[name, 0]["kl"] < 1 and 0.5 < found[name, 0]["same_token"] <= 1
    trained = [record for record in records if record["kind"] in ("trained", "blocks")]
    assert {seed for name, seed in found if name == "qad_g32"} == {0, 1}  # the main rows, every seed
    assert all(len(record["losses"]) == 2 and record["tokens"] == 2 * 2 * 64 for record in trained)
    assert found["qad_g32", 0]["losses"] != found["qad_g32", 1]["losses"]
    # what training multiplied is what was opened again, and the usual way ships another function
    for (name, _), record in found.items():
        if "packed_sha256" in record:
            assert record["agreement"]["exported"]["mean"] == 0, name
    assert found["lora_g32", 0]["gain"]["shipped"] == found["lora_g32", 0]["gain"]["trained"]
    assert found["naive_g32", 0]["gain"]["shipped"] != found["naive_g32", 0]["gain"]["trained"]
    costs = [record for record in records if record["kind"] == "cost"]
    assert len(costs) == 2 and all(len(record["step_s"]) == 2 for record in costs)
    assert [path.name for path in (work / "runs").iterdir()] == ["reference_tiny_2_64.pt"]  # no run is left


def test_the_document_has_every_table(work: Path, tmp_path: Path) -> None:
    report = ("--quick", "--work", work, "--report", "--docs", tmp_path)
    done = study(*report)
    assert done.returncode == 0, done.stderr
    path = tmp_path / "quality_qat.md"
    text = path.read_text()
    for heading in ("Rounded to nearest", "After training", "What the merge keeps", "Costs", "Bars"):
        assert f"## {heading}\n" in text
    assert "| conf=qat_lora, distill.weight=1 | INT4 g32 |" in text and "rounded_fp8 (seed 0)" in text
    assert text.count("| yes |") + text.count("| **no** |") == 6  # three recipes, minutes, what is kept, time of a step
    path.write_text(text + "\nWhy: by hand.\n")
    assert study(*report).returncode == 0 and path.read_text() == text + "\nWhy: by hand.\n"


def test_shares_are_of_what_rounding_lost(work: Path, modules: dict[str, ModuleType]) -> None:
    """Recovered: 0 at the rounded weights' perplexity, 1 at the 16-bit model's; kept likewise, of an adapter's gain."""
    records = modules["study.records"].Records(work / "results.jsonl")
    results = modules["study.qat.report"].Results(records, modules["study.qat.cells"].QUICK)
    results.rounded = {"16bit": {"perplexity": 20.0}, "g32": {"perplexity": 30.0}}
    results.trained = {"qat_g32": [{"perplexity": 30.0}, {"perplexity": 22.5}, {"perplexity": 20.0}]}
    assert results.recovered("qat_g32") == [0, 0.75, 1]
    results.trained = {"lora_g32": [{"gain": {"nearest": 3.0, "trained": 2.0, "shipped": 2.25}}]}
    assert results.kept("lora_g32") == [0.75]


def test_faults_of_the_command_line(tmp_path: Path) -> None:
    done = study("--data", tmp_path, "--work", tmp_path)
    assert done.returncode == 2 and "has no wikitext2_valid.txt; it is WikiText-2" in done.stderr
    done = study("--report", "--work", tmp_path)
    assert done.returncode == 2 and "has no results of this study; run python scripts/study_qat.py" in done.stderr
