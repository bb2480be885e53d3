"""The cells of a study in child processes, and their figures in the results."""

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from study.cell import Cell
from study.records import Records, machine

ROOT = Path(__file__).resolve().parent.parent.parent


class Runner:
    """Measures the cells that have no result yet, `jobs` of them at a time, each in a process with one thread a job.

    Processes of one thread each do not wait for one another, as the threads of one process do at each kernel, which
    costs most on a machine that others use too (docs/decisions.md, on the server's threads).
    """

    def __init__(
        self,
        script: Path,
        records: Records,
        data: Path,
        work: Path,
        *,
        jobs: int,
        say: Callable[[dict[str, Any]], str],
    ) -> None:
        """script: runs `run_child` when it is given --child; say: figures of a cell as text"""
        self.num_failed = 0
        self._script, self._records, self._data, self._work = script.resolve(), records, data, work
        self._jobs, self._say = jobs, say
        # The trainer of this checkout is what is studied, whatever is installed.
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        threads = str(max(1, (os.cpu_count() or 1) // jobs))
        self._environment = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": path}
        self._turn = threading.Lock()  # of results and output
        self._began, self._num_cells, self._num_done = time.monotonic(), 0, 0

    def run(self, cells: Sequence[Cell], *, per_process: int) -> None:
        """Measure and record; a cell that fails is recorded with its error, and the rest goes on.

        per_process  cells that one child measures, one after the other
        """
        left = [cell for cell in cells if not self._records.has(cell)]
        print(f"{len(cells)} cells, {len(cells) - len(left)} measured before; {self._records.path}", flush=True)
        self._num_cells = len(left)
        groups = [left[start : start + per_process] for start in range(0, len(left), per_process)]
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
        command = [sys.executable, str(self._script), "--child", json.dumps({**job, "fd": writing})]
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
            print(
                f"[{self._num_done}/{self._num_cells}, {left_min:.0f} min left] {self._said(cell, figures)}", flush=True
            )

    def _said(self, cell: Cell, figures: dict[str, Any]) -> str:
        if "error" in figures:
            return f"{cell.name} seed {cell.seed} FAILED: {figures['error']}"
        return f"{cell.name} seed {cell.seed}, {figures['cell_s']:.0f} s: {self._say(figures)}"


def _last_line(log: Path) -> str:
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{said[-1] if said else 'the process ended without a word'} ({log})"


def _provenance() -> dict[str, Any]:
    versions = {name: version(name) for name in ("lowbit", "torch", "transformers", "peft", "bitsandbytes")}
    return {"date": datetime.now().strftime("%Y-%m-%d"), "machine": machine(), "versions": versions}


# ---- the child


def run_child(job: dict[str, Any], module: str) -> None:
    """Measure the cells of a job by `module`.measure, a line of JSON each; an error ends the process.

    Its text is the log's last line.
    """
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    measure = importlib.import_module(module).measure
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
