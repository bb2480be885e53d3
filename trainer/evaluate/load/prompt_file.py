"""Prompts and traces from JSONL: what a row may hold, and where it is wrong."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.errors import UserError, require

LENGTHS = {"input_len": ("input_len", "input_length"), "output_len": ("output_len", "output_length", "max_tokens")}
"""Our names and those of published traces."""


@dataclass(frozen=True)
class PromptRow:
    """A row: `prompt` is text or messages, or None where a trace gives lengths only."""

    prompt: str | list[dict[str, Any]] | None
    input_len: int | None
    output_len: int | None
    timestamp: float | None = None


def read_prompts(path: str, *, needs_prompt: bool, needs_timestamp: bool) -> list[PromptRow]:
    """The rows of a JSONL file, blank lines aside.

    raises  UserError with file and line for a row that cannot be used, or a file without rows
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no UTF-8: {error.reason} at byte {error.start}") from None
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            rows.append(_row(line, f"{path}, line {number}", needs_prompt, needs_timestamp))
    require(bool(rows), f"{path} has no rows; give one JSON object a line")
    return rows


def _row(line: str, where: str, needs_prompt: bool, needs_timestamp: bool) -> PromptRow:
    try:
        row = json.loads(line)
    except ValueError as error:
        row, problem = None, f": {error}"
    else:
        problem = ""
    require(isinstance(row, dict), f"{where} is no JSON object{problem}")
    prompt = row.get("messages", row.get("prompt"))
    require(
        _is_prompt(prompt) or (prompt is None and not needs_prompt),
        f'{where}: give "prompt" (text) or "messages" (objects with role and content), not {prompt!r:.80}',
    )
    lengths = {key: _length(row, names, where) for key, names in LENGTHS.items()}
    timestamp = row.get("timestamp")
    is_number = isinstance(timestamp, (int, float)) and not isinstance(timestamp, bool)
    require(is_number or not needs_timestamp, f"{where}: timestamp={timestamp!r}; give a number")
    return PromptRow(prompt, **lengths, timestamp=float(timestamp) if is_number else None)


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, list):
        return bool(prompt) and all(isinstance(message, dict) and "role" in message for message in prompt)
    return isinstance(prompt, str) and bool(prompt)


def _length(row: dict[str, Any], names: tuple[str, ...], where: str) -> int | None:
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        return None
    value = row[name]
    require(type(value) is int and value >= 1, f"{where}: {name}={value!r}; give a number of tokens of at least 1")
    return value
