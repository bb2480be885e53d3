"""From files to batches: tokens a minute a core, packing, and memory on a file larger than one wants to hold.

    python scripts/bench_data.py [--quick] [--only tokenize_exchanges,table_memory] [--out DIR] [--gb 2]

SmolLM2-135M's tokenizer and template; rows are questions about the standard library, numbered so that no two are equal.
Every figure is of a process of its own with one thread.

    tokenize_exchanges       prompt/completion rows, read, checked, masked and written as a table
    tokenize_conversations   the same, in conversations of ten exchanges
    datasets_map             peer: what TRL's SFTTrainer does with the first file: `datasets`' JSON reader and two
                             renders a row through `map`, as it has it for prompt and completion
    packing                  rows of about those lengths (four bytes a token), put into rows of 2048 tokens
    table_memory             the first on a file of --gb (made and deleted), whose rows carry 16 kB that training does
                             not read, or tokenizing would take hours: the peak beyond the process before it, beside
                             that of a file of a twentieth
    text_memory              the same with nothing but rows to train on, on files of a tenth of that size

Last line: JSON.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

WORKS = ("tokenize_exchanges", "tokenize_conversations", "datasets_map", "packing", "table_memory", "text_memory")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
ROWS = (20_000, 2_000)
"""Exchanges of a timed file, whole and quick."""
EXCHANGES = 10
UNREAD_BYTES = 16_000
CAPACITY = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, 0.05 GB")
    parser.add_argument("--only", default="", help="comma-separated works")
    parser.add_argument("--out", type=Path, help="folder for bench_data.json")
    parser.add_argument("--gb", type=float, default=2.0, help="size of the file of table_memory")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(_MEASURES[args.measure[0]](Path(args.measure[1]))))
        return
    works = [work for work in WORKS if not args.only or work in args.only.split(",")]
    if unknown := set(filter(None, args.only.split(","))) - set(WORKS):
        parser.error(f"--only names {sorted(unknown)}; there are {', '.join(WORKS)}")
    gb = 0.05 if args.quick else args.gb
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for work in works for row in _rows_of(work, Path(folder), ROWS[args.quick], gb)]
    _compare(rows)
    for row in rows:
        ratio = f"  {row['ratio']:.2f} x {row['peer_name']}" if "ratio" in row else ""
        print(f"{row['work']:<24}{row['ours']:>14,.0f} {row['unit']}{ratio}")
    report = {"name": "bench_data", "machine": _machine(), "versions": _versions(), "rows": rows}
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "bench_data.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


def _rows_of(work: str, folder: Path, num_rows: int, gb: float) -> list[dict[str, Any]]:
    """The figures of one work."""
    if work.endswith("_memory"):
        size, unread = (gb, UNREAD_BYTES) if work == "table_memory" else (gb / 10, 0)
        large, small = (_run(work, _write(folder, bytes=int(b * 1e9), unread=unread)) for b in (size, size / 20))
        return [
            {"work": work, "ours": large["peak"] / 1e6, "unit": f"MB for {size:g} GB", "peer_name": f"{size / 20:g} GB",
             "peer": small["peak"] / 1e6, "ratio": large["peak"] / small["peak"], "tokens": large["tokens"]}
        ]  # fmt: skip
    path = _write(folder, rows=num_rows, exchanges=EXCHANGES if work == "tokenize_conversations" else 1)
    found = _run(work, path)
    if work == "packing":
        return [{"work": work, "ours": found["rate"], "unit": f"rows/s, {100 * found['full']:.1f} % full"}]
    return [{"work": work, "ours": found["rate"], "unit": "tokens a minute", "tokens": found["tokens"]}]


def _compare(rows: list[dict[str, Any]]) -> None:
    by_work = {row["work"]: row for row in rows}
    ours, peer = by_work.get("tokenize_exchanges"), by_work.get("datasets_map")
    if ours and peer:
        ours |= {"peer": peer["ours"], "peer_name": "datasets.map", "ratio": ours["ours"] / peer["ours"]}


def _write(folder: Path, *, rows: int = 0, bytes: int = 0, exchanges: int = 1, unread: int = 0) -> Path:
    """A JSON Lines file of `rows` exchanges, or of about `bytes`, `unread` of each row in a field that nobody reads."""
    from trainer.data.pydocs import load_questions

    questions, _ = load_questions(eval_rows=1)
    path, number = folder / "rows.jsonl", 0
    with path.open("w") as file:
        while number < rows or file.tell() < bytes:
            asked = [questions[(number + place) % len(questions)] for place in range(exchanges)]
            turns = [
                {"role": role, "content": f"{number}. {text}"}
                for each in asked
                for role, text in (("user", each.prompt), ("assistant", each.answer))
            ]
            row = (
                {"messages": turns} if exchanges > 1 else {"prompt": turns[0]["content"], "completion": asked[0].answer}
            )
            file.write(json.dumps(row) + "\n")
            number += exchanges
    return path


def _run(work: str, path: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=path.parent) as cache:
        command = [sys.executable, __file__, "--measure", work, str(path)]
        environment = {**os.environ, **ONE_THREAD, "HF_DATASETS_CACHE": cache, "LOWBIT_BENCH_CACHE": cache}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{work}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# ---- in a process of its own


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    from trainer.sources.bundled import bundled_model

    return AutoTokenizer.from_pretrained(bundled_model())


def _table(path: Path) -> dict[str, float]:
    from trainer.config.data import DataConfig, DataSource
    from trainer.config.preference import Method
    from trainer.data.dataset import open_table
    from trainer.data.opening import open_sources

    tokenizer = _tokenizer()
    os.environ["LOWBIT_CACHE"] = os.environ["LOWBIT_BENCH_CACHE"]
    config = DataConfig(DataSource.file, str(path), max_seq_len=CAPACITY)
    opened = open_sources(config, Method.none).train[0]
    before, began = _peak(), time.perf_counter()
    report = open_table(opened, config, tokenizer).report
    seconds = time.perf_counter() - began
    return {"tokens": report.tokens, "rate": 60 * report.tokens / seconds, "peak": _peak() - before}


def _datasets_map(path: Path) -> dict[str, float]:
    from datasets import load_dataset

    tokenizer, began = _tokenizer(), time.perf_counter()

    def tokenize(row: dict[str, str]) -> dict[str, list[int]]:
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template(turns, return_dict=False)
        return {"input_ids": ids, "completion_mask": [0] * len(prompt) + [1] * (len(ids) - len(prompt))}

    rows = load_dataset("json", data_files=str(path), split="train").map(tokenize)
    seconds = time.perf_counter() - began
    tokens = sum(map(len, rows["input_ids"]))
    return {"tokens": tokens, "rate": 60 * tokens / seconds}


def _packing(path: Path) -> dict[str, float]:
    import numpy as np

    from trainer.data.ordering.packing import pack

    lengths = np.array([len(line) // 4 for line in path.read_bytes().splitlines()]).clip(8, CAPACITY)
    began = time.perf_counter()
    units = pack(lengths, CAPACITY)
    seconds = time.perf_counter() - began
    return {"rate": len(lengths) / seconds, "full": float(lengths.sum() / (len(units) * CAPACITY))}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_MEASURES: dict[str, Callable[[Path], dict[str, float]]] = {
    "tokenize_exchanges": _table,
    "tokenize_conversations": _table,
    "datasets_map": _datasets_map,
    "packing": _packing,
    "table_memory": _table,
    "text_memory": _table,
}


def _machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores"


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("lowbit", "datasets", "tokenizers", "transformers")}


if __name__ == "__main__":
    main()
