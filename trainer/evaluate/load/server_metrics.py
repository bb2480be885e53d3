"""What the server says of itself during a point: /metrics, read now and then.

Pages are kept as they came and read after the point, so that reading them takes no time from the client. Names are
vLLM's (ours are the same where the figure is), SGLang's and llama.cpp's; a figure that a server does not tell is None.
"""

import asyncio
import re
import time

from trainer.evaluate.load.client import Client
from trainer.evaluate.load.framing import HttpError

GAUGES = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "hit_rate": ("sglang:cache_hit_rate",),
}
COUNTERS = {
    "preemptions": ("vllm:num_preemptions_total",),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
}
SERIES_LEN = 60
"""Points of a series in the report."""
_SAMPLE = re.compile(r"^([\w:]+)(?:\{[^}]*\})? +(\S+)", re.M)


class MetricsWatch:
    """Reads /metrics before, during and after a point: `async with MetricsWatch(...)`."""

    def __init__(self, client: Client, *, every_s: float) -> None:
        self._client, self._every_s = client, every_s
        self.pages: list[tuple[float, bytes]] = []
        self._task: asyncio.Task | None = None

    async def __aenter__(self) -> "MetricsWatch":
        if self._every_s > 0:
            await self._read()
            self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            await self._read()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self._read()

    async def _read(self) -> None:
        try:
            response = await self._client.fetch("GET", "/metrics", timeout_s=10.0)
        except (HttpError, TimeoutError):
            return  # a server too busy for it is not measured worse for that
        if response.status == 200:
            self.pages.append((time.perf_counter(), bytes(response.body)))


def server_figures(pages: list[tuple[float, bytes]], began: float) -> dict:
    """Figures of a point from its pages (moment, text); {} without any.

    began    the point's start, of time.perf_counter; series count seconds from it
    returns  prefix_hit_rate, kv_usage_peak, preemptions, waiting_peak, and series of [seconds, value]
    """
    samples = [(moment - began, _sums(page.decode(errors="replace"))) for moment, page in pages]
    if not samples:
        return {}
    first, last = samples[0][1], samples[-1][1]
    grown = {key: _grown(first, last, names) for key, names in COUNTERS.items()}
    series = {key: _series(samples, names) for key, names in GAUGES.items()}
    queries = grown["prefix_queries"]
    hit_rate = grown["prefix_hits"] / queries if queries else _last(series["hit_rate"])
    return {
        "prefix_hit_rate": hit_rate,
        "preemptions": grown["preemptions"],
        "kv_usage_peak": _peak(series["kv_usage"]),
        "waiting_peak": _peak(series["waiting"]),
        "running_peak": _peak(series["running"]),
        "waiting_over_time": _thinned(series["waiting"]),
        "kv_usage_over_time": _thinned(series["kv_usage"]),
    }


def _sums(page: str) -> dict[str, float]:
    """Metric -> its value, summed over labels."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(page):
        try:
            sums[name] = sums.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return sums


def _first(sums: dict[str, float], names: tuple[str, ...]) -> float | None:
    return next((sums[name] for name in names if name in sums), None)


def _grown(first: dict[str, float], last: dict[str, float], names: tuple[str, ...]) -> float | None:
    after = _first(last, names)
    return None if after is None else after - (_first(first, names) or 0.0)


def _series(samples: list[tuple[float, dict[str, float]]], names: tuple[str, ...]) -> list[tuple[float, float]]:
    return [(at, value) for at, sums in samples if (value := _first(sums, names)) is not None]


def _peak(series: list[tuple[float, float]]) -> float | None:
    return max((value for _, value in series), default=None)


def _last(series: list[tuple[float, float]]) -> float | None:
    return series[-1][1] if series else None


def _thinned(series: list[tuple[float, float]]) -> list[list[float]]:
    """At most SERIES_LEN of them; each the largest of those it stands for, so that peaks stay."""
    step = -(-len(series) // SERIES_LEN) or 1
    parts = [series[start : start + step] for start in range(0, len(series), step)]
    peaks = [max(part, key=lambda sample: sample[1]) for part in parts]
    return [[round(at, 3), value] for at, value in peaks]
