"""The run step by step, its layers, and the server under load, as charts."""

import math
from collections.abc import Iterator
from typing import Any

from trainer.evaluate.report.charts import Series, line_chart
from trainer.evaluate.report.gather import RunStory
from trainer.evaluate.report.scales import number
from trainer.page.document import table

LATENCIES = {"ttft_ms": "time to first token, ms", "tpot_ms": "time a token, ms", "e2e_ms": "whole answer, ms"}


def course(story: RunStory) -> Iterator[str]:
    """Loss, learning rate, gradient, speed and memory by step."""
    if not story.steps:
        return
    yield "<h2>The run, step by step</h2>"
    charts = [
        line_chart("loss", losses(story)),
        line_chart("learning rate", [Series("learning rate", story.series("lr"))], from_zero=True),
        line_chart("gradient norm, before clipping", [Series("gradient norm", story.series("grad_norm"), noisy=True)]),
        line_chart("tokens/s", [Series("tokens/s", story.series("tokens_per_s"), noisy=True)], from_zero=True),
        line_chart("peak memory so far, GiB", [Series("peak memory", memory(story))], from_zero=True),
        *_measured(story),
    ]
    yield f'<div class="charts">{"".join(charts)}</div>'


def losses(story: RunStory, *, colour: int = 0, name: str = "") -> list[Series]:
    """The training loss, and the held-out loss where it was taken; of the base before the first step too."""
    held_out, metrics = story.series("eval_loss"), story.metrics
    before, after = metrics.get("eval_loss_base"), metrics.get("eval_loss")
    if isinstance(before, float):
        held_out = [(0, before), *held_out]
    if isinstance(after, float) and isinstance(metrics.get("steps"), int):
        held_out = [*(point for point in held_out if point[0] != metrics["steps"]), (metrics["steps"], after)]
    train = Series(f"{name} train".strip(), story.series("loss"), colour, noisy=True)
    return [train, Series(f"{name} held out".strip(), held_out, colour + (not name), marks=True, dashed=bool(name))]


def memory(story: RunStory) -> list[tuple[float, float]]:
    """(step, GiB)"""
    return [(step, value / 2**30) for step, value in story.series("peak_memory_bytes")]


def _measured(story: RunStory) -> Iterator[str]:
    """What only some methods measure: a preference's margin, the divergence from a teacher."""
    known = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "peak_memory_bytes", "row_ids", "eval_loss"}
    names = dict.fromkeys(name for line in story.steps for name in line if name not in known)
    for name in names:
        if not name.startswith("eval_"):
            held_out = Series("held out", story.series(f"eval_{name}"), 1, marks=True)
            title = name.replace("_", " ")
            yield line_chart(title, [Series("train", story.series(name), noisy=True), held_out])


def layers(story: RunStory) -> Iterator[str]:
    """Errors by layer or block where the run wrote some."""
    charts = [*_loftq(story.layers.get("loftq.json", {})), *_blocks(story.layers.get("blockwise.json", {}))]
    for name, merged in story.merged.items():
        if isinstance(shares := merged.get("layers"), dict) and shares:
            points = [(float(place), float(share)) for place, share in enumerate(shares.values())]
            title = f"share of the update that is left in {name}, by layer"
            charts.append(line_chart(title, [Series("left", points)], x_name="layer", names=list(shares)))
    if any(charts):
        yield f'<h2>Layer by layer</h2>\n<div class="charts">{"".join(charts)}</div>'
    yield _worst(story.layers.get("loftq.json", {}))


def _loftq(report: dict[str, Any]) -> Iterator[str]:
    rows = report.get("layers", [])
    if not rows:
        return
    norms = [row["weight_norm"] or math.nan for row in rows]
    pairs = {"nearest codes": "error_plain", "codes and factors of LoftQ": "error"}
    lines = [
        Series(name, [(place, row[key] / norm) for place, (row, norm) in enumerate(zip(rows, norms, strict=True))], i)
        for i, (name, key) in enumerate(pairs.items())
    ]
    names = [row["name"] for row in rows]
    yield line_chart("error of the weight before training, of its norm", lines, x_name="layer", names=names)


def _worst(report: dict[str, Any]) -> str:
    rows = sorted(report.get("layers", []), key=lambda row: -row["ratio"])[:5]
    cells = [
        (
            row["name"],
            row["codebook"],
            row["rank"],
            number(row["error_plain"]),
            number(row["error"]),
            f"{row['ratio']:.3f}",
        )
        for row in rows
    ]
    return table("Where LoftQ gained least", ("layer", "codes", "rank", "error before", "after", "ratio"), cells)


def _blocks(report: dict[str, Any]) -> Iterator[str]:
    rows = report.get("blocks", [])
    pairs = {"nearest codes": "error_before", "trained": "error_after"}
    lines = [
        Series(name, [(row["index"], row[key]) for row in rows], i, marks=True)
        for i, (name, key) in enumerate(pairs.items())
    ]
    yield line_chart("error of each block's output", lines, x_name="block", log=True)


def load(story: RunStory) -> Iterator[str]:
    """Latency against requests a second, server by server."""
    if not story.load:
        return
    yield "<h2>Under load</h2>"
    charts = [
        line_chart(title, _latency(story.load, key), x_name="requests/s", log=True) for key, title in LATENCIES.items()
    ]
    charts.append(line_chart("output tokens/s", _throughput(story.load), x_name="requests/s", from_zero=True))
    yield f'<div class="charts">{"".join(charts)}</div>'
    names = (
        "server",
        "load",
        "answered",
        "TTFT p50 / p99, ms",
        "TPOT p50 / p99, ms",
        "output tokens/s",
        "within the SLO",
    )
    yield table("", names, [_load_cells(row) for row in story.load])


def _rate(row: dict[str, Any]) -> float:
    """Requests a second: as they were sent, or where nothing set a pace, as they were answered."""
    rate = row.get("rate")
    return float(
        rate if isinstance(rate, int | float) and math.isfinite(rate) else row.get("requests_per_s") or math.nan
    )


def _servers(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(str(row.get("server", "")) for row in rows))


def _latency(rows: list[dict[str, Any]], key: str) -> list[Series]:
    lines = []
    for colour, server in enumerate(_servers(rows)):
        for share, dashed in (("p50", False), ("p99", True)):
            found = (
                (_rate(row), (row.get(key) or {}).get(share)) for row in rows if str(row.get("server", "")) == server
            )
            points = sorted((rate, float(value)) for rate, value in found if value is not None)
            lines.append(Series(f"{server} {share}".strip(), points, colour, marks=True, dashed=dashed))
    return lines


def _throughput(rows: list[dict[str, Any]]) -> list[Series]:
    return [
        Series(
            server,
            sorted(
                (_rate(row), float(row.get("output_tokens_per_s") or 0.0))
                for row in rows
                if str(row.get("server", "")) == server
            ),
            colour,
            marks=True,
        )
        for colour, server in enumerate(_servers(rows))
    ]


def _load_cells(row: dict[str, Any]) -> tuple[object, ...]:
    spread = [
        " / ".join(number((row.get(key) or {}).get(share)) for share in ("p50", "p99"))
        for key in ("ttft_ms", "tpot_ms")
    ]
    goodput = row.get("goodput")
    within = "" if goodput is None else f"{goodput:.0%}"
    answered = f"{row['completed']} of {row.get('requests', '?')}"
    return (
        row.get("server", ""),
        row.get("load", ""),
        answered,
        *spread,
        number(row.get("output_tokens_per_s")),
        within,
    )
