"""An evaluation on disk: everything in evaluation.json, GSM8K's answers a line each; and its figures in one line."""

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

_LONG = ("rows", "pairs")
"""Keys that hold a line a window, prompt or question."""


def write_evaluation(report: dict[str, Any], folder: Path) -> Path:
    """Write the files, each complete or not at all; returns evaluation.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for subject in (report["original"], *report["candidates"]):
        lines = subject.get("gsm8k", {}).get("rows")
        if lines is not None:
            own = "original" if subject is report["original"] else f"{subject['name']}_{subject['path']}"
            name = f"gsm8k_{re.sub(r'[^A-Za-z0-9.-]+', '_', own)}.jsonl"
            _replace(folder / name, "".join(json.dumps(line) + "\n" for line in lines))
    path = folder / "evaluation.json"
    _replace(path, json.dumps(report, indent=2) + "\n")
    return path


def compact(report: dict[str, Any]) -> dict[str, Any]:
    """Without what has a line a row."""
    short = copy.deepcopy(report)
    for subject in (short["original"], *short["candidates"]):
        for part in (subject, *(value for value in subject.values() if isinstance(value, dict))):
            for key in _LONG:
                part.pop(key, None)
        for metrics in subject.get("tasks", {}).values():
            for figures in metrics.values():
                figures.pop("items", None)
    return short


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
