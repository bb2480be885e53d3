"""The report of a run, made anew: one HTML file that opens offline.

    python scripts/report.py run=outputs/qlora/<run>      the folder's report.html, plots/*.png with matplotlib
    python scripts/report.py run=latest out=page.html plots=false

A run writes its own at its end. This is for runs of older versions, stopped runs, and after a load test whose result
(`load.json`, the last line of scripts/bench_load.py, or its bench_load.json) was put into the folder. Last line: JSON.
"""

import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from trainer.compose import find_run
from trainer.config.errors import UserError, require
from trainer.settings import describe, read_settings


@dataclass
class Settings:
    run: str | None = None
    """The run folder, or latest."""
    out: str | None = None
    """Write the page to this file; null for report.html in the run folder."""
    plots: bool = True
    """Draw plots/*.png in the run folder too, if matplotlib is installed."""

    def __post_init__(self) -> None:
        require(
            self.out is None or Path(self.out).absolute().parent.is_dir(),
            f"out={self.out}: its folder does not exist; create it, or give another path",
        )


def main() -> None:
    if any(argument in ("-h", "--help") for argument in sys.argv[1:]):
        print(f"{__doc__.strip()}\n\n{describe(Settings())}")
        return
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        print(json.dumps(report(sys.argv[1:])))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def report(arguments: list[str]) -> dict[str, object]:
    """Write page and plots; returns what the JSON line holds.

    raises  UserError for a setting that is not accepted, or a folder that holds no run
    """
    settings = read_settings(Settings, arguments)
    require(settings.run is not None, "run is not set; use run=<run folder> or run=latest")
    run = find_run("latest") if settings.run == "latest" else Path(settings.run)
    from trainer.evaluate.report.page import write_report  # here, so that a mistake is answered at once
    from trainer.evaluate.report.plots import write_plots

    path = write_report(run, Path(settings.out) if settings.out else None)
    plots = write_plots(run) if settings.plots else []
    print(f"report   {path}")
    if plots:
        print(f"plots    {plots[0].parent}: {', '.join(path.name for path in plots)}")
    return {"name": "report", "run": str(run), "report": str(path), "plots": [str(path) for path in plots]}


if __name__ == "__main__":
    main()
