"""scripts/study_ptq.py: a quick study from the first cell to the document."""

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

SCRIPT = ROOT / "scripts" / "study_ptq.py"
CELLS = "16bit,rtn_int4_g32,rtn_int8,gptq_int4_g32,smoothquant,int8_dynamic"
GGUF = ",gguf_Q4_0,gguf-llama.cpp_Q4_0" if importlib.util.find_spec("llama_cpp") else ""


def study(*arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of a cell of every kind."""
    folder = tmp_path_factory.mktemp("study")
    done = study("--quick", "--work", folder, "--only", CELLS + GGUF, "--jobs", "1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


def test_every_cell_has_its_figures(work: Path) -> None:
    records = {r["name"]: r for r in map(json.loads, (work / "results.jsonl").read_text().splitlines())}
    assert not [record for record in records.values() if "error" in record]
    exact = records["16bit"]
    assert (exact["kl"], exact["same_token"], exact["exact"]) == (0, 1, 1)
    for name in ("rtn_int4_g32", "gptq_int4_g32", "smoothquant", "int8_dynamic"):
        assert 0 < records[name]["kl"] < 0.1 and 4 < records[name]["bits_per_weight"] < 9
    assert records["gptq_int4_g32"]["kl"] < records["rtn_int4_g32"]["kl"]
    assert records["gptq_int4_g32"]["output_error"] > 0
    hashes = {records[name]["packed_sha256"] for name in ("rtn_int4_g32", "gptq_int4_g32", "smoothquant")}
    assert len(hashes) == 3
    if GGUF:  # the same blocks, whoever rounds
        assert records["gguf_Q4_0"]["perplexity"] == pytest.approx(records["gguf-llama.cpp_Q4_0"]["perplexity"])


def test_the_document_has_every_table(work: Path, tmp_path: Path) -> None:
    report = ("--quick", "--work", work, "--report", "--docs", tmp_path)
    assert study(*report).returncode == 0
    path = tmp_path / "quality_ptq.md"
    text = path.read_text()
    for heading in ("Four bits", "Eight bits", "Bars", *(["GGUF"] if GGUF else [])):
        assert f"## {heading}\n" in text
    assert "| INT4 g32: method=gptq |" in text and "hqq_int4_g32" in text  # not measured
    assert text.count("| yes |") + text.count("| **no** |") == (
        5 if GGUF else 4
    )  # symmetric, asymmetric, static, dynamic
    path.write_text(text + "\nWhy: by hand.\n")
    assert study(*report).returncode == 0 and path.read_text() == text + "\nWhy: by hand.\n"


def test_shares_are_of_what_rounding_lost(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    records, cells, report = map(importlib.import_module, ("study.records", "study.ptq.cells", "study.ptq.report"))
    results = report.Results(records.Records(work / "results.jsonl"), cells.QUICK)
    for name, perplexity in {"16bit": 20.0, "rtn_int4_g32": 30.0, "gptq_int4_g32": 22.5}.items():
        results.by_name[name] = {"perplexity": perplexity}
    assert results.recovered("gptq_int4_g32") == 0.75 and results.recovered("rtn_int4_g32") is None


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LOWBIT_STUDY_GPTQMODEL", "LOWBIT_STUDY_LLMCOMPRESSOR"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.usefixtures("unconfigured")
def test_peers_that_are_not_there_are_left_out_and_said(work: Path, tmp_path: Path) -> None:
    """A peer is not measured, which is no failure; the document names what is missing."""
    done = study("--quick", "--work", tmp_path, "--only", "gptqmodel,llmcompressor-awq")
    assert done.returncode == 0 and "LOWBIT_STUDY_GPTQMODEL is not set" in done.stdout and "0 cells" in done.stdout
    assert study("--quick", "--work", work, "--report", "--docs", tmp_path).returncode == 0
    text = (tmp_path / "quality_ptq.md").read_text()
    assert "llmcompressor-gptq_int4_g32" in text.partition("**Not measured:**")[2].partition("\n\n")[0]


@pytest.mark.skipif(bool(importlib.util.find_spec("llmcompressor")), reason="this Python has the peer")
def test_a_peer_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOWBIT_STUDY_LLMCOMPRESSOR", sys.executable)
    done = study("--quick", "--work", tmp_path, "--only", "llmcompressor-awq", "--jobs", "1")
    assert done.returncode == 1 and "No module named 'llmcompressor'" in done.stdout
    assert not list((tmp_path / "runs").glob("*/export"))


def test_rows_of_peers_stand_under_their_format(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every peer's cell has a label, which names its version, and its settings are told."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    records, cells, report = map(importlib.import_module, ("study.records", "study.ptq.cells", "study.ptq.report"))
    found = records.Records(work / "results.jsonl")
    measured = next(record for record in found.of(cells.study_cells(cells.QUICK))["gptq_int4_g32"])
    figures = {name: measured[name] for name in measured if name not in cells.Cell.__annotations__ and name != "hash"}
    peers = records.Records(tmp_path / "results.jsonl")
    for cell in cells.study_cells(cells.QUICK):
        if cell.kind == "peer":
            peers.add(cell, {**figures, "version": "1.2.3", "cpu_s": 90.0, "settings": {"sym": True}}, {})
    report.write_report(peers, cells.QUICK, tmp_path)
    text = (tmp_path / "quality_ptq.md").read_text()
    assert "| INT4 g32: GPTQModel 1.2.3, GPTQ |" in text
    assert "| INT4 g32, asymmetric: llm-compressor 1.2.3, AWQ |" in text
    assert text.count("1.2.3, ") == 2 * len(cells.peers(cells.QUICK)) and "sym=True; 1.5 minutes" in text
