"""One cell of the study: quantize into a folder that the format's other cells find, then evaluate it, or serve it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from study.cell import Cell
from study.formats.cells import CALIBRATION_FILE, FLOORS, QAT_RUN, TEST_FILE

from trainer.config.evaluation import EvaluationConfig
from trainer.config.ptq import REPORT, PtqConfig
from trainer.evaluate.quality.evaluation import evaluate
from trainer.evaluate.quality.files import compact
from trainer.evaluate.quality.subject import Subject
from trainer.ptq.run import quantize
from trainer.settings import read_settings

KV_BYTES = 1 << 28
"""Of the served model's KV cache."""
START_S = 600
_SCRIPTS = Path(__file__).resolve().parent.parent.parent


def measure(cell: Cell, data: Path, folder: Path) -> dict[str, Any]:
    """The figures of a cell; what is quantized stays in <work>/models, where the format's other cells find it.

    data    holds WikiText-2's validation and test text
    folder  <work>/runs/<cell>
    """
    began = time.monotonic()
    models = folder.parent.parent / "models"
    made = _made(cell, data, models)
    figures = _quality(cell, data, made) if cell.kind == "quality" else _load(cell, made, folder)
    shutil.rmtree(folder, ignore_errors=True)
    return {**figures, "cell_s": time.monotonic() - began, "threads": torch.get_num_threads()}


def _made(cell: Cell, data: Path, models: Path) -> str:
    """What run= and model= name."""
    name = cell.name.partition("@")[0]
    if name == "16bit":
        return cell.sizes["model"]
    if name == "qat":
        return os.environ[QAT_RUN]
    sizes = "_".join(str(cell.sizes[key]) for key in ("model", "rows", "row_len"))
    folder = models / f"{name}_{sizes}"
    if not (folder / REPORT).is_file():
        settings = [
            *(f"model={cell.sizes['model']}", f"dtype={_dtype(cell)}", f"output_dir={folder}", "eval_rows=2"),
            *(f"data={data / CALIBRATION_FILE}", f"rows={cell.sizes['rows']}", f"max_seq_len={cell.sizes['row_len']}"),
        ]
        quantize(read_settings(PtqConfig, [*settings, *cell.overrides]))
    return str(folder)


def _dtype(cell: Cell) -> str:
    return "float32" if cell.sizes["model"] == "tiny" else "bfloat16"


def _quality(cell: Cell, data: Path, made: str) -> dict[str, Any]:
    sizes, path = cell.sizes, cell.name.partition("@")[2]
    settings = [
        *(f"run={made}", f"against={sizes['model']}", f"path={path}", f"dtype={_dtype(cell)}"),
        *(f"text={data / TEST_FILE}", f"windows={sizes['windows']}", f"window={sizes['window_len']}"),
        *(f"num_prompts={sizes['prompts']}", f"max_new_tokens={sizes['answer_len']}", "recovered=false"),
        f"floors={str(cell.name in FLOORS).lower()}",
    ]
    report = compact(evaluate(read_settings(EvaluationConfig, settings), say=print))
    report["settings"].pop("run")
    candidate, original = report["candidates"][0], report["original"]
    seconds = None
    if (Path(made) / REPORT).is_file():
        seconds = json.loads((Path(made) / REPORT).read_text())["seconds"]
    return {
        **{key: candidate[key] for key in candidate if key not in ("name", "kind", "model", "path")},
        "found": candidate["kind"],
        "original": {key: original[key] for key in ("perplexity", "computed_by", "kept", "bytes_on_disk")},
        "protocol": report["protocol"],
        "intervals": report["intervals"],
        "quantize_s": seconds,
    }


# ---- under load


def _load(cell: Cell, made: str, folder: Path) -> dict[str, Any]:
    """Served by `python -m trainer.serve`, asked by scripts/bench_load.py; both in processes of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = cell.sizes
    with _served(cell, made, folder) as (process, url):
        resident = _memory(process.pid, "VmRSS")
        lengths = (f"input_len={sizes['input_len']}", f"output_len={sizes['output_len']}")
        load = (f"rate={sizes['rate']},inf", f"num_requests={sizes['requests']}", "warmup=2", "metrics_every_s=0.2")
        command = [sys.executable, _SCRIPTS / "bench_load.py", f"url={url}", *lengths, *load]
        command += [f"price_per_hour={sizes['price_per_hour']}", f"out={folder}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(done.stdout)
        if done.returncode:
            raise RuntimeError(f"bench_load.py ended with {done.returncode}: {done.stdout.strip().splitlines()[-1]}")
        row, at_once = json.loads(done.stdout.strip().splitlines()[-1])["rows"][:2]
        peak = _memory(process.pid, "VmHWM")
    usage = row["server_says"].get("kv_usage_peak")
    kept = ("requests", "completed", "errors", "output_tokens_per_s", "total_tokens_per_s", "saturated")
    kept += ("ttft_ms", "tpot_ms", "e2e_ms")
    return {
        **{key: row[key] for key in kept},
        "at_once": {key: at_once[key] for key in (*kept[:5], "price_per_million_output_tokens")},
        "rate": sizes["rate"],
        "kv_peak_bytes": None if usage is None else usage * KV_BYTES,
        "resident_bytes": resident,
        "peak_memory_bytes": peak,
    }


@contextmanager
def _served(cell: Cell, made: str, folder: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server on any free port, and its address."""
    model = Subject.of(made, "server").model
    settings = [f"model={model}", f"dtype={_dtype(cell)}", "quantization=null", "port=0", "max_num_seqs=16"]
    settings += [f"kv_cache_memory_bytes={KV_BYTES}", "max_model_len=1024", "served_model_name=served"]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer.serve", *settings], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process, _address(process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _address(process: subprocess.Popen, log: Path) -> str:
    """raises  RuntimeError with the server's last line if it ends, or does not start in time"""
    began = time.monotonic()
    while time.monotonic() - began < START_S:
        said = log.read_text(errors="replace")
        if found := re.search(r"http://[\w.]+:\d+", said):
            if _answers(found[0]):
                return found[0]
        elif process.poll() is not None:
            raise RuntimeError(f"the server ended: {said.strip().splitlines()[-1:]}")
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start in {START_S} s")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def _memory(pid: int, key: str) -> int | None:
    """Bytes of a process, by its name in /proc; None where there is none."""
    status = Path(f"/proc/{pid}/status")
    if not status.is_file():
        return None
    return next(int(line.split()[1]) * 1024 for line in status.open() if line.startswith(f"{key}:"))
