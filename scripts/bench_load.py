"""Any server that speaks OpenAI's API under load: latencies, throughput, and the rate that it sustains.

    python scripts/bench_load.py url=http://127.0.0.1:8000 rate=1,2,4 input_len=128 output_len=64
    python scripts/bench_load.py rate=auto ttft_ms=500 tpot_ms=60                the highest rate within an SLO
    python scripts/bench_load.py url=http://a:8000,http://b:8000 names=ours,vllm points in turns, side by side
    python scripts/bench_load.py trace=trace.jsonl rate=trace                    arrivals as they were recorded
    python scripts/bench_load.py workload=conversation turns=4 think_time_s=2
    python scripts/bench_load.py concurrency=1,8                                 a closed loop, labelled as one
    python scripts/bench_load.py --help                                          every key

Requests are sent when they are due, whatever the server does, and latencies count from that moment. --quick is
quick=true, --out DIR is out=DIR. Last line: JSON. Exits with 1 if a server answered nothing, 2 after a user's mistake.
"""

import contextlib
import json
import logging
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trainer.config.errors import UserError
from trainer.config.load import LoadConfig
from trainer.evaluate.load.report import NAME, compared_rows, print_report, read_rows, sustained_rows, write_files
from trainer.evaluate.load.run import run_load
from trainer.settings import describe, read_settings

_HELP = """{doc}
Every key with its default:

{keys}
"""


def main() -> None:
    """Run the command line."""
    arguments = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in arguments):
        print(_HELP.format(doc=__doc__, keys=describe(LoadConfig())))
        return
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("trainer").setLevel(logging.INFO)
    try:
        config = read_settings(LoadConfig, _as_settings(arguments))
        if config.out:
            _make_folder(config.out)
        earlier = [row for path in config.compared_files for row in read_rows(path)]
        rows = run_load(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        sys.exit(130)
    sustained, compared = sustained_rows(rows, config), compared_rows(rows, earlier)
    print_report(rows, sustained, compared, config)
    report = {"name": NAME, "machine": _machine(), "versions": _versions(), "rows": [*rows, *sustained, *compared]}
    if config.out:
        write_files(report, Path(config.out))
    print(json.dumps(report, allow_nan=False))
    answered = {row["server"] for row in rows if row["completed"]}
    sys.exit(int(any(row["server"] not in answered for row in rows)))


def _as_settings(arguments: list[str]) -> list[str]:
    """The options that all benchmarks have, as settings."""
    settings, rest = [], iter(arguments)
    for argument in rest:
        if argument == "--quick":
            settings.append("quick=true")
        elif argument == "--out":
            settings.append(f"out={next(rest, '')}")
        else:
            settings.append(argument)
    return settings


def _make_folder(path: str) -> None:
    """Ahead of the load: a run must not end with nowhere to go."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={path} cannot be a folder: {error.strerror}") from None


def _machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores"


def _versions() -> dict[str, str]:
    """Of this client; what servers say of themselves stands in their rows."""
    found = {"python": platform.python_version()}
    with contextlib.suppress(PackageNotFoundError):
        found["lowbit"] = version("lowbit")
    return found


if __name__ == "__main__":
    main()
