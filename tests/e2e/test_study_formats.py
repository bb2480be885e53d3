"""scripts/study_formats.py: a quick study from the first cell to the document."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

SCRIPT = ROOT / "scripts" / "study_formats.py"
LLAMA = ",gguf_q4_0@llama_cpp" if importlib.util.find_spec("llama_cpp") else ""
CELLS = "16bit@server,nf4_rtn@server,int8_dynamic@server,nf4_rtn@load" + LLAMA


def study(*arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    done = study("--quick", "--work", folder, "--only", CELLS, "--jobs", "1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


def test_cells_have_figures_with_intervals(work: Path) -> None:
    records = {r["name"]: r for r in map(json.loads, (work / "results.jsonl").read_text().splitlines())}
    assert records["16bit@server"]["kl"]["value"] == 0
    nf4, int8 = records["nf4_rtn@server"], records["int8_dynamic@server"]
    assert nf4["kl"]["low"] > int8["kl"]["high"] > 0 and nf4["bytes_on_disk"] < int8["bytes_on_disk"]
    load = records["nf4_rtn@load"]
    assert load["completed"] == load["requests"] == 4 and load["at_once"]["price_per_million_output_tokens"] > 0
    assert 0 <= load["kv_peak_bytes"] < 1 << 28 and load["resident_bytes"] > 1e7


def test_the_document_has_both_tables(work: Path, tmp_path: Path) -> None:
    done = study("--quick", "--work", work, "--report", "--docs", tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "quality_formats.md").read_text()
    assert "## Quality\n" in text and "## Under load\n" in text and "qat@server" in text  # not measured
    assert text.count("| NF4, rounded to nearest, ") == 2 and "4 of 4" in text
    assert study("--quick", "--work", work, "--only", CELLS, "--jobs", "1").stdout.count("0 min left") == 0  # resumable


def test_a_run_that_is_not_there_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWBIT_STUDY_QAT_RUN", raising=False)
    done = study("--quick", "--work", tmp_path, "--only", "qat")
    assert done.returncode == 0 and "LOWBIT_STUDY_QAT_RUN is not set" in done.stdout and "0 cells" in done.stdout
