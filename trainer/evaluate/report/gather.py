"""A run as its folder tells it: everything that the report, the plots and the comparison show.

    config.yaml     settings                    metrics.jsonl   a line a step
    metrics.json    final figures               report.json     answers and data, as the run knew them (record.py)
    sessions.jsonl  commands and versions       bad_rows*.jsonl what was left out
    loftq.json, blockwise.json                  errors by layer or block
    export/*/lowbit.json                        what of the update is in a merged model
    load.json       of scripts/bench_load.py

Each may be absent, of an older run or cut short by a crash: what cannot be read is left out, never an error.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from trainer.config.errors import require
from trainer.config.preference import Method
from trainer.config.schema import Config, to_dict

log = logging.getLogger(__name__)

CONFIG, METRICS, STEPS = "config.yaml", "metrics.json", "metrics.jsonl"
RECORD, SESSIONS = "report.json", "sessions.jsonl"
LOADS = ("load.json", "bench_load.json")
MAX_BAD = 100
"""Bad rows that are listed."""
UNREADABLE = (OSError, ValueError, OmegaConfBaseException, YAMLError)


@dataclass
class RunStory:
    """What is known of a run."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    """Dotted key -> value."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """The same of the schema."""
    metrics: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    """`answers` and `data`; see record.py."""
    sessions: list[dict[str, Any]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    """Of the newest checkpoint."""
    bad_rows: list[dict[str, Any]] = field(default_factory=list)
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """File name -> content, of those with errors by layer or block."""
    merged: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Export format -> what lowbit.json says of the merge."""
    load: list[dict[str, Any]] = field(default_factory=list)
    """Points of a load test."""

    @property
    def name(self) -> str:
        """The folder, and the one that it lies in: `qlora/2026-01-31_12-00-00`."""
        return "/".join(self.folder.absolute().parts[-2:])

    @property
    def method(self) -> Method:
        try:
            return Method(self.settings.get("preference.method", Method.none))
        except ValueError:
            return Method.none

    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Settings that are not the schema's default: key -> (value, default)."""
        return {
            key: (value, self.defaults.get(key))
            for key, value in self.settings.items()
            if key not in ("output_dir", "resume") and value != self.defaults.get(key)
        }

    def series(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of one figure of metrics.jsonl, where it is."""
        return [(line["step"], line[name]) for line in self.steps if isinstance(line.get(name), int | float)]


def gather(folder: Path) -> RunStory:
    """Read a run folder.

    raises  UserError if it is none
    """
    require(
        any((folder / name).is_file() for name in (CONFIG, STEPS)),
        f"{folder} is no run folder: neither {CONFIG} nor {STEPS} is in it; give outputs/<recipe>/<date>_<time>",
    )
    states = sorted((folder / "checkpoints").glob("step_*/state.json"), key=lambda path: path.stat().st_mtime)
    layers = {name: _object(folder / name) for name in ("loftq.json", "blockwise.json")}
    identities = {path.parent.name: _object(path).get("merged") for path in folder.glob("export/*/lowbit.json")}
    bad_rows = [row for path in sorted(folder.glob("bad_rows*.jsonl")) for row in _lines(path)]
    return RunStory(
        folder=folder,
        settings=_settings(folder / CONFIG),
        defaults=flat(to_dict(Config())),
        metrics=_object(folder / METRICS),
        steps=[line for line in _lines(folder / STEPS) if isinstance(line.get("step"), int)],
        record=_object(folder / RECORD),
        sessions=list(_lines(folder / SESSIONS)),
        state=_object(states[-1]) if states else {},
        bad_rows=bad_rows,
        layers={name: content for name, content in layers.items() if content},
        merged={name: merged for name, merged in identities.items() if isinstance(merged, dict)},
        load=next(filter(None, (_load_points(folder / name) for name in LOADS)), []),
    )


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except UNREADABLE as error:
        log.warning("report   %s cannot be read: %s", path, error)
        return {}
    return flat(tree) if isinstance(tree, dict) else {}


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except UNREADABLE as error:
        log.warning("report   %s cannot be read: %s", path, error)
        return {}
    return content if isinstance(content, dict) else {}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file; a line that a crash cut short is left out."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            content = json.loads(line) if line.strip() else None
        except ValueError:
            continue
        if isinstance(content, dict):
            yield content


def _load_points(path: Path) -> list[dict[str, Any]]:
    """The answered points in what scripts/bench_load.py wrote, or printed as its last line."""
    rows = _object(path).get("rows", [])
    return [row for row in rows if isinstance(row, dict) and row.get("work") == "load" and row.get("completed")]
