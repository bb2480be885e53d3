"""The table for people, the files, and the comparison of servers."""

import csv
import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trainer.config.errors import UserError
from trainer.config.load import AUTO, LoadConfig
from trainer.evaluate.load.measures import TPOT_DEFINITION
from trainer.evaluate.load.sweep import held

LATENCIES = {"ttft_ms": "TTFT ms", "itl_ms": "ITL ms", "tpot_ms": "TPOT ms", "e2e_ms": "e2e ms"}
COMPARED = (
    *(
        ("ttft_ms", "p50"),
        ("ttft_ms", "p99"),
        ("tpot_ms", "p50"),
        ("tpot_ms", "p99"),
        ("e2e_ms", "p50"),
        ("e2e_ms", "p99"),
    ),
    ("output_tokens_per_s", None),
)
NAME = "bench_load"


def sustained_rows(rows: list[dict[str, Any]], config: LoadConfig) -> list[dict[str, Any]]:
    """For rate=auto: the highest rate of each server that kept the SLO, or None."""
    found = []
    for server in dict.fromkeys(row["server"] for row in rows) if config.rate == AUTO else ():
        rates = [row["rate"] for row in rows if row["server"] == server and row["completed"] and held(row, config)]
        found.append({"work": "load_sustained", "server": server, "rate": max(rates, default=None), "slo": config.slo})
    return found


def compared_rows(rows: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first server beside each other one at the same load: a row a figure, with ratio = first / other.

    earlier  rows of files; all of them are others
    """
    found = []
    first = next((row["server"] for row in rows), None)
    for ours in (row for row in rows if row["server"] == first and row["completed"]):
        others = [row for row in rows if row["server"] != first] + earlier
        for peer in (row for row in others if row["load"] == ours["load"] and row["completed"]):
            found += [_compared(ours, peer, *figure) for figure in COMPARED]
    return [row for row in found if row["ours"] is not None and row["peer"]]


def read_rows(path: str) -> list[dict[str, Any]]:
    """The points in a file that an earlier run wrote.

    raises  UserError if it is no such file
    """
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))["rows"]
        return [row for row in rows if row["work"] == "load"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"compare={path} is no report of bench_load.py; give {NAME}.json of an earlier run") from None


def print_report(rows: list[dict[str, Any]], sustained: list[dict], compared: list[dict], config: LoadConfig) -> None:
    """Tables to stdout, each point's notes below."""
    console = Console(width=140, highlight=False)
    console.print(_points_table(rows))
    if any(row["completed"] for row in rows):
        console.print(_latency_table([row for row in rows if row["completed"]]))
    slo = ", ".join(f"{name}={bound:g}" for name, bound in config.slo.items() if bound is not None) or "none given"
    print(f"latencies count from the moment a request was due; p50 / p90 / p99 (mean). {TPOT_DEFINITION}. SLO: {slo}")
    for row in rows:
        for note in [*_window_note(row), *_machine_notes(row, config), *row["notes"]]:
            print(f"{row['server']}, {row['load']}: {note}")
    for row in sustained:
        rate = "no rate that was tried" if row["rate"] is None else f"{row['rate']:.4g} requests a second"
        print(f"{row['server']}: {rate} with {config.slo_share:.0%} of the requests within the SLO")
    if compared:
        console.print(_compared_table(compared))


def write_files(report: dict[str, Any], folder: Path) -> None:
    """`bench_load.json` and `bench_load.csv` (a line a point), each whole or absent."""
    folder.mkdir(parents=True, exist_ok=True)
    points = [_flat(row) for row in report["rows"] if row["work"] == "load"]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for point in points for key in point)))
    writer.writeheader()
    writer.writerows(points)
    for name, content in ((f"{NAME}.json", json.dumps(report, indent=2) + "\n"), (f"{NAME}.csv", text.getvalue())):
        hidden = folder / f".{name}"
        hidden.write_text(content, encoding="utf-8", newline="")
        hidden.replace(folder / name)


def _flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested figures as ttft_ms_p50; lists as JSON."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}_")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value) if isinstance(value, list) else value
    return flat


def _compared(ours: dict[str, Any], peer: dict[str, Any], name: str, share: str | None) -> dict[str, Any]:
    values = [row[name].get(share) if share else row[name] for row in (ours, peer)]
    work = "_".join(filter(None, ("load", name.removesuffix("_ms"), share)))
    row = {"work": work, "load": ours["load"], "rate": ours["rate"], "ours_name": ours["server"]}
    row |= {"ours": values[0], "peer": values[1], "peer_name": peer["server"], "unit": "ms" if share else "tokens/s"}
    return row | {"ratio": values[0] / values[1] if values[0] is not None and values[1] else None}


def _points_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("server", "load, req/s", "answered", "answers/s", "output tok/s", "all tok/s", "goodput", "")
    for row in rows:
        answered = f"{row['completed']} of {row['requests']}"
        if not row["completed"]:
            table.add_row(row["server"], row["load"], answered, *[""] * 4, _flags(row))
            continue
        rates = [_number(row[name]) for name in ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")]
        goodput = "" if row["goodput"] is None else f"{row['goodput']:.0%}"
        table.add_row(row["server"], row["load"], answered, *rates, goodput, _flags(row))
    return table


def _latency_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("server", "load, req/s", *LATENCIES.values())
    for row in rows:
        table.add_row(row["server"], row["load"], *(_spread(row[name]) for name in LATENCIES))
    return table


def _flags(row: dict[str, Any]) -> str:
    flags = {"errors": bool(row["errors"]), "saturated": bool(row.get("saturated"))}
    flags["client late"] = any(note.startswith("CLIENT LATE") for note in row["notes"])
    return ", ".join(flag for flag, shown in flags.items() if shown)


def _spread(figure: dict[str, float]) -> str:
    if not figure:
        return "-"
    return f"{' / '.join(_number(figure[share]) for share in ('p50', 'p90', 'p99'))} ({_number(figure['mean'])})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _window_note(row: dict[str, Any]) -> list[str]:
    steady = row.get("steady")
    if not steady:
        return []
    start, end = steady["window_s"]
    return [
        f"steady from {start:.1f} to {end:.1f} s: {_number(steady['output_tokens_per_s'])} output tokens/s, "
        f"{_number(steady['requests_per_s'])} answers/s, {_number(steady['in_flight'])} requests in flight"
    ]


def _machine_notes(row: dict[str, Any], config: LoadConfig) -> list[str]:
    """What the server says of itself, energy and price, where known."""
    says, said = row.get("server_says") or {}, []
    hits = says.get("prefix_hit_rate", None) if says else row.get("cached_share")
    figures = {"prefix hits": hits, "KV usage at most": says.get("kv_usage_peak")}
    said += [f"{name} {value:.0%}" for name, value in figures.items() if value is not None]
    counts = {"preemptions": says.get("preemptions"), "waiting at most": says.get("waiting_peak")}
    said += [f"{name} {value:.0f}" for name, value in counts.items() if value is not None]
    if row.get("joules_per_output_token") is not None:
        sources = " + ".join(row["energy_joules"])
        said.append(f"{row['joules_per_output_token']:.3g} J an output token ({sources}, idling included)")
    if (price := row.get("price_per_million_output_tokens")) is not None:
        total = row["price_per_million_tokens"]
        said.append(
            f"at {config.price_per_hour:g} an hour a million output tokens cost {price:.3g}"
            + (f", a million tokens {total:.3g}" if total is not None else "")
        )
    return ["; ".join(said)] if said else []


def _compared_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("load, req/s", "figure", "first", "", "other", "", "unit", "first / other")
    for row in rows:
        values = [_number(row["ours"]), row["ours_name"], _number(row["peer"]), row["peer_name"]]
        table.add_row(row["load"], row["work"].removeprefix("load_"), *values, row["unit"], f"{row['ratio']:.2f}")
    return table
