"""Every GPU kernel on the GPU at hand: right first, then how fast, in one table.

    python scripts/gpu_report.py [--quick] [--only correct,linear] [--out DIR]      under 8 minutes on an H200
    python scripts/gpu_report.py --tune [--only tune_attention] [--out DIR]         writes kernels/tuned.json
    python scripts/gpu_report.py --dry-run                                          on a CPU, tiny: proves this script

Needs torch, triton, transformers and peft; bitsandbytes, where it imports, is the peer. Units (gpu/) run one after the
other in a child process that reports line by line: a kernel that breaks the GPU's context or never returns costs its
own unit, is named in the table, and the rest goes on in a new child. Times are medians of CUDA events, with the
second-level cache overwritten before each call and the launch hidden behind a wait on the GPU. A row's limit is the
time its bytes take at the copy bandwidth measured here, or its operations at the rate of torch's own product, whichever
is longer. Greedy tokens with CUDA graphs must be those without.

Writes gpu_report.json and gpu_report.md into --out. The last line of stdout is JSON. Ends with 1 if a result was wrong
or a unit gave none.
"""

import argparse
import json
import math
import os
import platform
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a checkout on a lent machine need not be installed

from gpu.bench import Bench, Limits, Rows, described, failed, free_memory, machine, measure_limits, say, still_works
from gpu.correct import CHECKS, check
from gpu.models import compiled, qlora, serve_decoder, serve_engine
from gpu.speed import dequantize, elementwise, head, linear, linear_rows, paged, training
from gpu.tune import TUNING_UNITS

from trainer.kernels import _tuning

UNIT_LIMIT_S = 150
"""A unit without a word for so long is taken for hung: loading and compiling take a few seconds each."""
BUDGET_S = 450
"""Units that have not begun by then are left out, and the table says so."""


# ---- the parent process: units in children, rows, files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape of each, no 8B step")
    parser.add_argument("--only", default="", help="comma-separated unit names, or beginnings of them")
    parser.add_argument("--out", type=Path, help="folder for gpu_report.json and gpu_report.md")
    parser.add_argument("--tune", action="store_true", help="time candidate tiles and write kernels/tuned.json")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, references only")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds after which no unit begins")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return run_child(json.loads(args.child))
    if not args.dry_run and not torch.cuda.is_available():
        print(
            f"gpu_report.py needs a GPU that torch {torch.__version__} sees (CUDA or ROCm), triton, transformers and "
            "peft; there is none here. --dry-run proves the script on a CPU",
            file=sys.stderr,
        )
        sys.exit(2)
    known = TUNING_UNITS if args.tune else UNITS
    only = tuple(name for name in args.only.split(",") if name) or ("",)
    names = [name for name in known if name.startswith(only)]
    if not names:
        parser.error(f"--only {args.only}: use {', '.join(known)}, or beginnings of them")
    report = run_units(names, args)
    print(markdown(report))
    print(json.dumps(report))
    wrong = [row for row in report["rows"] if row["ours"] is None or (row["met"] is False and row["exact"])]
    sys.exit(1 if wrong else 0)


def run_units(names: list[str], args: argparse.Namespace) -> dict:
    """Run units in order; after a child that died, hung or lost its GPU a new one takes the rest."""
    began = time.monotonic()
    report: dict[str, Any] = {"name": "gpu_report", "machine": platform.machine(), "limits": None, "rows": []}
    report |= {"versions": versions(), "unit_s": {}, "tuned": {}}
    limits, left = None, list(names)
    while left:
        # A tuner may take its time: nobody waits for a table.
        budget = math.inf if args.tune else args.budget_s - (time.monotonic() - began)
        if budget <= 0:
            report["rows"] += [failed(name, f"not run: {args.budget_s:g} s were over") for name in left]
            break
        options = {"quick": args.quick, "dry": args.dry_run, "tune": args.tune}
        child = Child.running({"units": left, **options, "limits": limits, "budget_s": budget})
        unit, num_left = None, len(left)
        for message in child.messages():
            match message:
                case {"limits": measured, "machine": machine}:
                    limits, report["limits"], report["machine"] = measured, measured, machine
                case {"began": unit}:
                    left.remove(unit)
                case {"row": row}:
                    report["rows"].append(row)
                case {"tuned": entries}:
                    report["tuned"] |= entries
                    if not args.dry_run:
                        write_tuned(report["limits"]["architecture"], entries, args.out)
                case {"done": name, "seconds": seconds}:
                    unit, report["unit_s"][name] = None, seconds
                    write(report, args.out)
        if unit is not None:
            report["rows"].append(failed(unit, child.end))
        elif child.end == "budget":
            report["rows"] += [failed(name, f"not run: {args.budget_s:g} s were over") for name in left]
            break
        elif len(left) == num_left:
            report["rows"] += [failed(name, f"its process ended before it began: {child.end}") for name in left]
            break
    report["seconds"] = time.monotonic() - began
    write(report, args.out)
    return report


class Child:
    """A process that reports in lines of JSON."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.end = ""
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    @classmethod
    def running(cls, job: dict) -> "Child":
        """This script again, running the units of a job."""
        environment = dict(os.environ)
        if job["dry"]:
            environment |= {"LOWBIT_KERNELS": "reference", "CUDA_VISIBLE_DEVICES": ""}
            if job["tune"]:  # references have no tiles; Triton's interpreter launches what a GPU would
                environment |= {"LOWBIT_KERNELS": "triton", "TRITON_INTERPRET": "1"}
        return cls([sys.executable, sys.argv[0], "--child", json.dumps(job)], environment)

    def messages(self) -> Iterator[dict]:
        """What it says, until it ends or is silent for UNIT_LIMIT_S; `end` then says how it went."""
        lines: queue.Queue[str | None] = queue.Queue()

        def read() -> None:
            for line in self._process.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=UNIT_LIMIT_S)
            except queue.Empty:
                self._process.kill()  # and no wait: a process that the GPU's driver holds may never end
                self.end = f"no answer within {UNIT_LIMIT_S} s; the process was ended"
                return
            if line is None:
                code = self._process.wait()
                self.end = self.end or f"the process ended with {code}, see stderr"
                return
            if line.startswith('{"'):  # anything else is what some library prints
                message = json.loads(line)
                self.end = message.get("end", "")
                yield message


def write_tuned(arch: str, entries: dict[str, dict], out: Path | None) -> None:
    """Measured entries into kernels/tuned.json, or beside the report where that may not be written."""
    path = _tuning.TABLE_PATH
    if not os.access(path, os.W_OK):
        path = (out or Path()) / "tuned.json"
        print(f"{_tuning.TABLE_PATH} cannot be written; the table goes to {path}", file=sys.stderr)
    _tuning.store(arch, entries, path)


def write(report: dict, out: Path | None) -> None:
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu_report.json").write_text(json.dumps(report, indent=2) + "\n")
    (out / "gpu_report.md").write_text(markdown(report) + "\n")


def markdown(report: dict) -> str:
    lines = [f"{report['machine']}; " + ", ".join(f"{name} {number}" for name, number in report["versions"].items())]
    if report["limits"]:
        copy, products, integers = (report["limits"][name] for name in Limits._fields)
        lines.append(
            f"Limits, measured in this run: copy {copy / 1e9:.0f} GB/s, products {products / 1e12:.0f} TFLOP/s in "
            f"bfloat16 and {integers / 1e12:.0f} TOP/s in int8."
        )
    header = ("work", "shape", "ours", "unit", "of limit", "target", "met", "peer", "ratio", "peer is", "note")
    lines += ["", f"| {' | '.join(header)} |", "|" + " --- |" * len(header)]
    for row in report["rows"]:
        cells = (
            row["work"], row["shape"], number(row["ours"]), row["unit"],
            "" if row["of_limit"] is None else f"{row['of_limit']:.0%}", row["target"] or "",
            {True: "yes", False: "**no**", None: ""}[row["met"]], number(row["peer"]), number(row["ratio"]),
            row["peer_name"] or "", row["note"].replace("|", "/").replace("\n", " ")[:300],
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("lowbit", "torch", "triton", "transformers", "peft", "bitsandbytes"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


# ---- the child process


def run_child(job: dict) -> None:
    began = time.monotonic()
    device = torch.device("cpu" if job["dry"] else "cuda:0")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    bench = Bench(device, job["quick"], job["dry"])
    measured = job["limits"] or {**measure_limits(bench)._asdict(), "architecture": _tuning.architecture(device)}
    say(limits=measured, machine=machine(device))
    bench = Bench(device, job["quick"], job["dry"], Limits(*(measured[name] for name in Limits._fields)))
    for name in job["units"]:
        if time.monotonic() - began > job["budget_s"]:
            say(end="budget")
            return
        say(began=name)
        unit_began = time.monotonic()
        try:
            torch.manual_seed(0)
            for row in {**UNITS, **TUNING_UNITS}[name](bench):
                say(row=row) if "work" in row else say(tuned=row)
        except Exception as error:  # a report with a hole is worth more than none
            say(row=failed(name, described(error)))
        say(done=name, seconds=time.monotonic() - unit_began)
        if not still_works(bench):
            say(end="the GPU's context broke")
            os._exit(3)  # destructors of tensors would wait for a GPU that does not answer
        free_memory(bench)


def checked(name: str) -> Callable[[Bench], Rows]:
    build, exact = CHECKS[name]
    return lambda bench: check(name, build, exact=exact, bench=bench)


UNITS: dict[str, Callable[[Bench], Rows]] = {
    **{f"correct_{name}": checked(name) for name in CHECKS},
    "dequantize": dequantize,
    "linear": linear,
    "linear_rows": linear_rows,
    "head": head,
    "elementwise": elementwise,
    "training": training,
    "paged": paged,
    "compile": compiled,
    "qlora": qlora,
    "serve_decoder": serve_decoder,
    "serve_engine": serve_engine,
}

if __name__ == "__main__":
    main()
