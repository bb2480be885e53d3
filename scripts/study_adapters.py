"""The study of adapters: LoRA over 16, 4, 3 and 2 bits, LoftQ and other starting points, on SmolLM2-135M.

    python scripts/study_adapters.py [--work DIR]                 about 80 minutes on two quiet cores; resumable
    python scripts/study_adapters.py --only loftq5_nf2,start      cells by name, or by the beginning of it
    python scripts/study_adapters.py --only cost                  time and memory, on a machine that does nothing else
    python scripts/study_adapters.py --only long                  16 bits and NF4 with eight times the steps
    python scripts/study_adapters.py --report                     writes docs/quality_adapters.md and docs/plots/
    python scripts/study_adapters.py --quick                      a tiny random model: proves this script

Data: GSM8K and WikiText-2 in --data (gsm8k_train.jsonl, gsm8k_test.jsonl, wikitext2_test.txt). Results are lines of
results.jsonl in --work, one a cell, by name, seed and a hash of the settings; cells that are there are not measured
again. A cell that fails has its error there, is tried again by the next call, and makes this script end with 1.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from study.cells import FULL, QUICK, TEST_FILE, TEXT_FILE, TRAIN_FILE, Cell, Sizes, chosen_cells
from study.records import Records, machine

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    TRAIN_FILE: "github.com/openai/grade-school-math, grade_school_math/data/train.jsonl",
    TEST_FILE: "github.com/openai/grade-school-math, grade_school_math/data/test.jsonl",
    TEXT_FILE: "WikiText-2, word level, for example github.com/pytorch/examples, word_language_model/data/wikitext-2",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny random model, made-up rows, two steps")
    parser.add_argument("--only", default="", metavar="CELL,...", help="names of cells, or beginnings of them")
    parser.add_argument("--work", type=Path, default=Path("outputs/study_adapters"), help="folder of the results")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of the data")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cells at a time, one if costs are among them")
    parser.add_argument("--report", action="store_true", help="measure nothing; write the document from the results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="--report: folder of the document")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return run_child(json.loads(args.child))
    args.work.mkdir(parents=True, exist_ok=True)
    records, sizes = Records(args.work / "results.jsonl"), QUICK if args.quick else FULL
    try:
        if args.report:
            from study.report import write_report

            return write_report(records, sizes, args.docs)
        cells = chosen_cells(sizes, args.only)
        data = made_up_data(args.work / "data") if args.quick else found_data(args.data)
    except ValueError as error:
        parser.error(str(error))
    alone = any(cell.kind == "cost" for cell in cells)
    study = Study(records, sizes, data, args.work, jobs=1 if alone else args.jobs)
    study.run(cells)
    sys.exit(1 if study.num_failed else 0)


# ---- data


def found_data(folder: Path) -> Path:
    """raises ValueError naming the source of a file that is not there"""
    for name, source in SOURCES.items():
        if not (folder / name).is_file():
            raise ValueError(f"--data {folder} has no {name}; it is {source}. Put it there, or give --data its folder")
    return folder.resolve()


def made_up_data(folder: Path) -> Path:
    """Sums as GSM8K writes them, and words: for --quick."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for name, num_rows in ((TRAIN_FILE, 64), (TEST_FILE, 16)):
        pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(num_rows)]
        rows = [{"question": f"What is {a} + {b}?", "answer": f"<<{a}+{b}={a + b}>>\n#### {a + b}"} for a, b in pairs]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / TEXT_FILE).write_text(" ".join(draw.choice(["a", "of", "robe", "film"]) for _ in range(2000)))
    return folder.resolve()


# ---- the parent: cells in child processes, results


class Study:
    """Measures the cells that have no result yet, `jobs` of them at a time, each in a process with one thread a job.

    Processes of one thread each do not wait for one another, as the threads of one process do at each kernel, which
    costs most on a machine that others use too (docs/decisions.md, on the server's threads).
    """

    def __init__(self, records: Records, sizes: Sizes, data: Path, work: Path, *, jobs: int) -> None:
        self.num_failed = 0
        self._records, self._sizes, self._data, self._work, self._jobs = records, sizes, data, work, jobs
        # The trainer of this checkout is what is studied, whatever is installed.
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        threads = str(max(1, (os.cpu_count() or 1) // jobs))
        self._environment = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": path}
        self._turn = threading.Lock()  # of results and output
        self._began, self._num_cells, self._num_done = time.monotonic(), 0, 0

    def run(self, cells: list[Cell]) -> None:
        """Measure and record; a cell that fails is recorded with its error, and the rest goes on."""
        left = [cell for cell in cells if not self._records.has(cell)]
        print(f"{len(cells)} cells, {len(cells) - len(left)} measured before; {self._records.path}", flush=True)
        self._num_cells = len(left)
        size = self._sizes.cells_per_process
        groups = [left[start : start + size] for start in range(0, len(left), size)]
        with ThreadPoolExecutor(self._jobs) as pool:
            for _ in pool.map(self._measure, groups):
                pass

    def _measure(self, group: list[Cell]) -> None:
        """Children take the cells in order; after one that failed a new child takes the rest."""
        left = list(group)
        while left:
            log = self._work / "logs" / f"{left[0].name}_{left[0].seed}.log"
            for figures in self._child(left, log):
                self._record(left.pop(0), figures)
            if left:
                self._record(left.pop(0), {"error": _last_line(log)})

    def _child(self, cells: list[Cell], log: Path) -> Iterator[dict[str, Any]]:
        """The figures of the cells in their order, fewer if one fails; what the process says goes into `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        reading, writing = os.pipe()
        job = {"cells": [cell.to_dict() for cell in cells], "data": str(self._data), "work": str(self._work)}
        command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps({**job, "fd": writing})]
        with log.open("wb") as output, os.fdopen(reading) as lines:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, pass_fds=[writing], env=self._environment
            )
            os.close(writing)
            yield from (json.loads(line) for line in lines)
            if (code := process.wait()) < 0:  # it had no time for a last word
                output.write(f"ended by signal {-code}\n".encode())

    def _record(self, cell: Cell, figures: dict[str, Any]) -> None:
        with self._turn:
            self._records.add(cell, figures, _provenance())
            self._num_done += 1
            self.num_failed += "error" in figures
            left_min = (time.monotonic() - self._began) / self._num_done * (self._num_cells - self._num_done) / 60
            print(f"[{self._num_done}/{self._num_cells}, {left_min:.0f} min left] {_said(cell, figures)}", flush=True)


def _said(cell: Cell, figures: dict[str, Any]) -> str:
    if "error" in figures:
        return f"{cell.name} seed {cell.seed} FAILED: {figures['error']}"
    shown = {
        "start_loss": ".4f",
        "loss": ".4f",
        "perplexity": ".5g",
        "right": "d",
        "setup_s": ".0f",
        "tokens_per_s": ".0f",
    }
    texts = [f"{name} {figures[name]:{form}}" for name, form in shown.items() if name in figures]
    texts += [f"{loss:.4f} at step {step}" for step, loss in figures.get("curve", [])]
    texts += [f"alpha {point['alpha']}: perplexity {point['perplexity']:.5g}" for point in figures.get("points", [])]
    return f"{cell.name} seed {cell.seed}, {figures['cell_s']:.0f} s: {'; '.join(texts)}"


def _last_line(log: Path) -> str:
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{said[-1] if said else 'the process ended without a word'} ({log})"


def _provenance() -> dict[str, Any]:
    versions = {name: version(name) for name in ("lowbit", "torch", "transformers", "peft", "bitsandbytes")}
    return {"date": datetime.now().strftime("%Y-%m-%d"), "machine": machine(), "versions": versions}


# ---- the child


def run_child(job: dict[str, Any]) -> None:
    """Measure the cells of a job, a line of JSON each; an error ends the process, its text is the log's last line."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    from study.measure import measure

    with os.fdopen(job["fd"], "w") as results:
        for saved in job["cells"]:
            cell = Cell.from_dict(saved)
            figures = measure(cell, Path(job["data"]), Path(job["work"]) / "runs" / f"{cell.name}_{cell.seed}")
            results.write(json.dumps(figures) + "\n")
            results.flush()


def _end_with(parent: int) -> None:
    """A killed study leaves nobody behind who writes where the next one does."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main()
