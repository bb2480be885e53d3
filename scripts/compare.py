"""Runs side by side: final figures, speed, memory, and the settings that differ.

    python scripts/compare.py outputs/qlora/2026-01-31_12-00-00 outputs/lora/2026-01-31_14-00-00
    python scripts/compare.py outputs/qlora/* html=compare.html        a page with the curves over each other

The first run is what the others are compared with. Folders that a wildcard finds and that are no runs are left out, as
long as two are left; a run that is named alone must be one. Last line: JSON.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from trainer.config.errors import UserError, require
from trainer.settings import read_settings


@dataclass
class Settings:
    html: str | None = None
    """Write a page to this file."""

    def __post_init__(self) -> None:
        require(
            self.html is None or Path(self.html).absolute().parent.is_dir(),
            f"html={self.html}: its folder does not exist; create it, or give another path",
        )


def main() -> None:
    if len(sys.argv) == 1 or any(argument in ("-h", "--help") for argument in sys.argv[1:]):
        print(__doc__.strip())
        return
    try:
        print(json.dumps(compare_runs(sys.argv[1:]), allow_nan=False))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def compare_runs(arguments: list[str]) -> dict[str, object]:
    """Print the tables, write the page; returns what the JSON line holds.

    arguments  run folders, and `key=value` of `Settings`
    raises     UserError for a setting that is not accepted, or fewer than two runs
    """
    own = [argument for argument in arguments if argument.partition("=")[0] in Settings.__annotations__]
    settings = read_settings(Settings, own)
    folders = [Path(argument) for argument in arguments if argument not in own]
    from trainer.evaluate.report.compare_page import print_comparison, write_comparison  # here: torch comes with it
    from trainer.evaluate.report.comparing import compare

    found = compare(_runs(folders))
    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = 40 + 24 * len(found.names)
    print_comparison(found, console)
    if settings.html:
        write_comparison(Path(settings.html), found)
        print(f"page     {settings.html}")
    return {"name": "compare", **found.as_dict(), "html": settings.html}


def _runs(folders: list[Path]) -> list[Path]:
    """Without files and folders beside runs, such as a sweep's own, where enough are left."""
    runs = [folder for folder in folders if any((folder / name).is_file() for name in ("config.yaml", "metrics.jsonl"))]
    for folder in folders:
        if folder not in runs and len(runs) >= 2 and len(folders) > 2:
            print(f"{folder} is no run folder and is left out", file=sys.stderr)
    return runs if len(runs) >= 2 and len(folders) > 2 else folders


if __name__ == "__main__":
    main()
