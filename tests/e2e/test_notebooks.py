import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent.parent / "notebooks"
SHORT = {"model": "tiny", "num_steps": 4, "eval_every": 2, "max_rows": 40, "eval_rows": 8}
SMALL = {
    "01_first_qlora": {},
    "02_what_nf4_does_to_a_weight": {"model": "tiny"},
    "03_qlora_loftq_qat": SHORT,
    "04_serve_and_load_test": {
        **{"model": "tiny", "num_steps": 2, "max_rows, eval_rows": (40, 8), "rates": "10,20", "num_requests": 6},
        "prefix_len, input_len, output_len": (32, 8, 4),
    },
    "05_read_a_report": SHORT,
}
"""Values for the first cell of code."""
LAST = {
    "01_first_qlora": "25",  # the resumed run ended at 20 + 5 steps
    "02_what_nf4_does_to_a_weight": "True",  # rounded twice is rounded once
    "03_qlora_loftq_qat": "True",  # the codes in the file are those that training multiplied
    "04_serve_and_load_test": "(12, 0)",  # all requests of both rates were answered, and the server left with 0
    "05_read_a_report": "['lora.alpha', 'lora.rank']",  # in what the two runs differ
}
PATHS = pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)


@PATHS
def test_notebook_runs(path, tmp_path):
    pytest.importorskip("matplotlib", reason="notebooks draw with it")
    notebook = nbformat.read(path, as_version=4)
    cell = next(cell for cell in notebook.cells if cell.cell_type == "code")
    for name, value in SMALL[path.stem].items():
        cell.source, replaced = re.subn(rf"^{name} = .*$", f"{name} = {value!r}", cell.source, flags=re.M)
        assert replaced == 1, name
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert notebook.cells[-1].outputs[-1]["data"]["text/plain"] == LAST[path.stem]


@PATHS
def test_notebook_is_stored_without_outputs(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
