"""What only a running run knows, written beside its metrics, so that a report can be made anew at any time.

sessions.jsonl   a line a session (a resumed run has several): command, versions, machine
report.json      `answers`: prompts with the held-out, the base's and the tuned answer
                 `data`: counts by source, lengths, and rows with their targets marked
"""

import json
import logging
import os
import platform
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from hydra.core.hydra_config import HydraConfig
from transformers import PreTrainedTokenizerBase

from trainer.data.dataset import row_lengths
from trainer.data.inspection.counts import bars_of
from trainer.data.rows import BadRow
from trainer.data.shown import stretches
from trainer.data.table import Report
from trainer.evaluate.report.gather import RECORD, SESSIONS
from trainer.evaluate.samples import Sample
from trainer.page.document import write_whole

log = logging.getLogger(__name__)

PACKAGES = ("lowbit", "torch", "transformers", "peft", "accelerate", "datasets", "tokenizers", "bitsandbytes")
MAX_CHARS = 1500
"""Of a stretch of an example row."""
EXAMPLES = 2


def begin_session(run_dir: Path, *, step: int) -> None:
    """Add this session's line; where it cannot be written, the run goes on.

    step  where it begins
    """
    line = {
        "began": datetime.now().astimezone().isoformat(timespec="seconds"),
        "step": step,
        "command": command(),
        "versions": versions(),
        "machine": machine(),
    }
    try:
        with (run_dir / SESSIONS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        log.warning("report   %s cannot be written: %s", run_dir / SESSIONS, error)


def command() -> str | None:
    """What was typed; of a sweep, what would be for this job alone. None for a run that Python code started."""
    if not HydraConfig.initialized():
        return None
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    script = sys.argv[0] if sys.argv[0].endswith("train.py") else "-m trainer"
    first = ["python"] if processes == 1 else ["torchrun", "--standalone", f"--nproc_per_node={processes}"]
    return " ".join([*first, script, *map(shlex.quote, HydraConfig.get().overrides.task)])


def versions() -> dict[str, str]:
    """Of Python and of the packages that compute."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a checkout that is not installed, a package that is not needed
            continue
    return found


def machine() -> str:
    """What computed, in words."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {torch.get_num_threads()} threads"


def write_record(
    run_dir: Path,
    samples: Sequence[Sample],
    rows: Dataset,
    held_out: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sources: dict[str, Report],
    bad_rows: Sequence[BadRow],
    copies: int | None,
) -> None:
    """Write report.json.

    rows      trained on; of a stream its first ones
    sources   by name; none of a stream
    bad_rows  those that are known; counts come from `sources` where there are some
    copies    training rows that were dropped, for a held-out row says the same; None where nobody counted
    """
    kinds = Counter(row.kind for row in bad_rows)
    if sources:
        kinds = sum((Counter(report.bad) for report in sources.values()), Counter())
    data = {
        "rows": len(rows),
        "held_out_rows": len(held_out),
        "streamed": not sources,
        "copies": copies,
        "sources": {name: asdict(report) for name, report in sources.items()},
        "bad": dict(kinds),
        "lengths": bars_of(row_lengths(rows)) if len(rows) else [],
        "examples": [_example(row, tokenizer) for row in rows.select(range(min(EXAMPLES, len(rows))))],
    }
    record = {"answers": [asdict(sample) for sample in samples], "data": data}
    write_whole(run_dir / RECORD, json.dumps(record, indent=2) + "\n")


def _example(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A row as the model reads it: each document in stretches that are learned or read."""
    sides = {"": "", "rejected_": "rejected"} if "rejected_input_ids" in row else {"": ""}
    if len(sides) > 1:
        sides[""] = "chosen"
    documents = []
    for side, title in sides.items():
        parts = stretches(row[f"{side}input_ids"], row[f"{side}labels"], tokenizer)
        documents.append({"title": title, "stretches": [{**part._asdict(), "text": _cut(part.text)} for part in parts]})
    return {"origin": row.get("origin", ""), "documents": documents}


def _cut(text: str) -> str:
    half = MAX_CHARS // 2
    return text if len(text) <= MAX_CHARS else f"{text[:half]} … {text[-half:]}"
