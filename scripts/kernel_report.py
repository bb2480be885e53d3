"""Measure every kernel here and write the tables of docs/kernels.md.

    python scripts/kernel_report.py [--quick] [--out docs/kernels.md]

Two parts: `scripts/bench_kernels.py` (correctness, speed, share of the machine's limit, ratio to the peer), and what
ahead-of-time compilation says about the Triton kernels on GPUs that are not here (spilled registers, shared memory; it
needs the `test` extra). Only the text between the two markers of the file is replaced. About five minutes on two cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
AOT_TESTS = "compile or spill or ahead"
BEGIN, END = "<!-- written by scripts/kernel_report.py -->", "<!-- end of what scripts/kernel_report.py writes -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest shapes, few repeats")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "kernels.md")
    args = parser.parse_args()
    text = args.out.read_text(encoding="utf-8") if args.out.is_file() else f"# Kernels\n\n{BEGIN}\n{END}\n"
    if BEGIN not in text or END not in text:
        sys.exit(f"{args.out} lacks the lines {BEGIN!r} and {END!r}, between which the tables go")
    sections = [speed_section(measure(args.quick), args.quick), compile_section(compile_ahead())]
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    args.out.write_text(f"{head}{BEGIN}\n\n{chr(10).join(sections)}\n{END}{tail}", encoding="utf-8")


def measure(quick: bool) -> dict:
    command = [sys.executable, str(ROOT / "scripts" / "bench_kernels.py"), *(["--quick"] if quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout.rpartition("\n{")[0])
    return json.loads(done.stdout.splitlines()[-1])


def speed_section(report: dict, quick: bool) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    limits = ", ".join(f"{_limit_name(name)} {value:.0f}" for name, value in report["limits"].items())
    lines = [
        "## Speed on this machine",
        "",
        f"`python scripts/bench_kernels.py{' --quick' if quick else ''}`, {date.today()}, {report['machine']};",
        f"{versions}.",
        f"Limits measured in the same run: {limits}.",
        "",
        "| op | shape | ours | of limit | peer | ratio | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        peer = "" if row["peer"] is None else f"{row['peer_name']}: {row['peer']:.1f}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        error = "" if row["error"] is None else f"{row['error']:.0e}"
        lines.append(
            f"| `{row['work']}` | {row['shape']} | {row['ours']:.1f} {row['unit']} | {row['of_limit']:.0%} | {peer} | "
            f"{ratio} | {error} |"
        )
    return "\n".join([*lines, ""])


def _limit_name(key: str) -> str:
    """copy_GB_s -> copy, GB/s:"""
    kind, unit = key.split("_", 1)
    return f"{kind}, {unit.replace('_s', '/s')}:"


def compile_ahead() -> list[dict]:
    """One entry for each kernel, target and set of constants that the tests compile."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "aot.jsonl"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels", "-k", AOT_TESTS]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "LOWBIT_AOT_REPORT": str(report)}, check=True)
        return [json.loads(line) for line in report.read_text().splitlines()]


def compile_section(entries: list[dict]) -> str:
    """The worst of each kernel and target: what decides whether it fits."""
    kernels: dict[str, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        kernels[entry["kernel"].strip("_")][entry["target"]].append(entry)
    targets = sorted({entry["target"] for entry in entries})
    lines = [
        "## Compiled ahead of time",
        "",
        f"`LOWBIT_AOT_REPORT=aot.jsonl pytest tests/kernels -k '{AOT_TESTS}'`, {date.today()}:",
        "the most shared memory in KiB (and spilled bytes, if any) over all compiled variants. Nothing here was",
        "timed.",
        "",
        f"| kernel | variants | {' | '.join(targets)} |",
        f"|---|---|{'---|' * len(targets)}",
    ]
    for kernel, by_target in sorted(kernels.items()):
        cells = [_worst(by_target[target]) for target in targets]
        lines.append(f"| `{kernel}` | {max(map(len, by_target.values()))} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _worst(entries: list[dict]) -> str:
    if not entries:
        return "not compiled"
    shared = max(entry["shared"] for entry in entries) / 1024
    spills = max(entry["spills"] for entry in entries)
    return f"{shared:.1f}" + (f", {spills} spilled" if spills else "")


if __name__ == "__main__":
    main()
