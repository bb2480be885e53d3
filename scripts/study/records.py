"""Results on disk, a line of JSON a cell, and the few statistics that the report takes of them."""

import json
import math
import os
import platform
import statistics
from pathlib import Path
from typing import Any

from study.cell import Cell


class Records:
    """results.jsonl: lines are added and never changed; of several for one cell the last counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found: dict[tuple[str, int, str], dict[str, Any]] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            if line.endswith("}"):  # a kill may have cut the last line short
                record = json.loads(line)
                self._found[record["name"], record["seed"], record["hash"]] = record

    def has(self, cell: Cell) -> bool:
        """Whether the cell was measured, and not only tried."""
        return cell.key in self._found and "error" not in self._found[cell.key]

    def add(self, cell: Cell, figures: dict[str, Any], provenance: dict[str, Any]) -> None:
        """Write a line. `figures` with the key `error` says that the cell failed."""
        record = {**cell.to_dict(), **provenance, **figures}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut_short = self.path.is_file() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if cut_short else "") + json.dumps(record) + "\n")
        self._found[cell.key] = record

    def of(self, cells: list[Cell]) -> dict[str, list[dict[str, Any]]]:
        """Name -> records of its seeds, of the cells that were measured, in the order of `cells`."""
        found: dict[str, list[dict[str, Any]]] = {}
        for cell in cells:
            if self.has(cell):
                found.setdefault(cell.name, []).append(self._found[cell.key])
        return found

    def failures(self, cells: list[Cell]) -> list[dict[str, Any]]:
        """Records of the cells that were tried in vain."""
        return [self._found[cell.key] for cell in cells if cell.key in self._found and not self.has(cell)]


def mean_deviation(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation (n - 1); the deviation of one value is nan."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def wilson(right: int, total: int, *, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share (Wilson 1927), 95 % for z = 1.96."""
    share = right / total
    centre, spread = share + z * z / (2 * total), z * math.sqrt(share * (1 - share) / total + (z / (2 * total)) ** 2)
    return (centre - spread) / (1 + z * z / total), (centre + spread) / (1 + z * z / total)


def machine() -> str:
    """The processor's name and its cores."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores"
