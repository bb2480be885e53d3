"""A cell: what a study measures at a time, known by name, seed and a hash of its settings.

Where files lie does not enter the hash, so results stay valid when the checkout or the data move.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Cell:
    """One line of the results.

    kind       how it is measured; the study's own word
    overrides  what the method is, as on train.py's command line
    sizes      what it depends on of the study's `Sizes`
    """

    name: str
    kind: str
    seed: int
    overrides: tuple[str, ...]
    sizes: dict[str, Any]

    @property
    def key(self) -> tuple[str, int, str]:
        """name, seed and the hash of all settings."""
        settings = json.dumps([self.kind, self.overrides, self.sizes], sort_keys=True)
        return self.name, self.seed, hashlib.sha256(settings.encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {**asdict(self), "overrides": list(self.overrides), "hash": self.key[2]}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "Cell":
        """The cell behind `to_dict`."""
        return cls(saved["name"], saved["kind"], saved["seed"], tuple(saved["overrides"]), saved["sizes"])


def choose(cells: Sequence[Cell], only: str) -> list[Cell]:
    """The cells whose names, or beginnings of them, `only` lists with commas between.

    raises  ValueError naming the names that exist
    """
    names = tuple(name for name in only.split(",") if name)
    unknown = [name for name in names if not any(cell.name.startswith(name) for cell in cells)]
    if unknown or not names:
        known = ", ".join(dict.fromkeys(cell.name for cell in cells))
        raise ValueError(f"--only {only}: no cell begins with {', '.join(unknown) or 'that'}; cells: {known}")
    return [cell for cell in cells if cell.name.startswith(names)]
