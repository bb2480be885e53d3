"""A study as a command: what there is to measure, where its data come from, and the options that all studies share.

Data lie in --data. Results are lines of results.jsonl in --work, one a cell, by name, seed and a hash of the settings;
cells that are there are not measured again. A cell that fails has its error there, is tried again by the next call, and
makes the command end with 1.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.cell import Cell
from study.records import Records
from study.runner import Runner, run_child

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Study:
    """What a command needs to know of a study.

    script        the command's own file, which child processes run again
    package       has `measure.measure(cell, data, folder)` and `report.write_report(records, sizes, docs)`: loaded when
                  they are needed, since torch takes seconds
    full, quick   sizes of the study, and of a proof that it runs
    choose        sizes and the text of --only -> cells; raises ValueError
    sources       file of the data -> where it comes from
    make_data     writes made-up files of these names into a folder, for --quick
    say           a cell and its figures -> what the progress shows
    """

    script: Path
    package: str
    full: Any
    quick: Any
    choose: Callable[[Any, str], list[Cell]]
    sources: Mapping[str, str]
    make_data: Callable[[Path], None]
    say: Callable[[dict[str, Any]], str]

    def main(self, description: str | None) -> None:
        """The command."""
        parser = self._parser(description)
        args = parser.parse_args()
        if args.child:
            return run_child(json.loads(args.child), f"{self.package}.measure")
        args.work.mkdir(parents=True, exist_ok=True)
        records, sizes = Records(args.work / "results.jsonl"), self.quick if args.quick else self.full
        try:
            if args.report:
                return importlib.import_module(f"{self.package}.report").write_report(records, sizes, args.docs)
            cells = self.choose(sizes, args.only)
            data = self._made_up_data(args.work / "data") if args.quick else self._found_data(args.data)
        except ValueError as error:
            parser.error(str(error))
        alone = any(cell.kind == "cost" for cell in cells)
        runner = Runner(self.script, records, data, args.work, jobs=1 if alone else args.jobs, say=self.say)
        runner.run(cells, per_process=sizes.cells_per_process)
        sys.exit(1 if runner.num_failed else 0)

    def _parser(self, description: str | None) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=__doc__
        )
        parser.add_argument("--quick", action="store_true", help="a tiny random model, made-up rows, two steps")
        parser.add_argument("--only", default="", metavar="CELL,...", help="names of cells, or beginnings of them")
        work = Path("outputs") / self.script.stem
        parser.add_argument("--work", type=Path, default=work, help="folder of the results")
        parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of the data")
        parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cells at a time, one for times")
        parser.add_argument("--report", action="store_true", help="write the document; measure nothing")
        parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="--report: folder of the document")
        parser.add_argument("--child", help=argparse.SUPPRESS)
        return parser

    def _found_data(self, folder: Path) -> Path:
        """raises ValueError naming the source of a file that is not there"""
        for name, source in self.sources.items():
            if not (folder / name).is_file():
                raise ValueError(
                    f"--data {folder} has no {name}; it is {source}. Put it there, or give --data its folder"
                )
        return folder.resolve()

    def _made_up_data(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        self.make_data(folder)
        return folder.resolve()
