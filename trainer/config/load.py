"""LoadConfig: what `python scripts/bench_load.py` accepts as key=value."""

import json
import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from trainer.config.errors import UserError, require


class Arrivals(StrEnum):
    poisson = "poisson"
    uniform = "uniform"
    gamma = "gamma"


class Workload(StrEnum):
    """What is asked; see trainer/evaluate/load/workload.py."""

    random = "random"
    prefix = "prefix"
    conversation = "conversation"
    file = "file"


class Api(StrEnum):
    auto = "auto"
    completions = "completions"
    chat = "chat"


AUTO, TRACE = "auto", "trace"
QUICK_REQUESTS, QUICK_BISECTIONS = 16, 2


@dataclass
class LoadConfig:
    """A load on one or more servers that speak OpenAI's API."""

    url: str = "http://127.0.0.1:8000"
    """Servers, comma-separated; each point of the load runs on one after the other, and the first is compared with the
    others."""
    compare: str | None = None
    """More servers, or a JSON file that an earlier run wrote into `out`, comma-separated."""
    names: str | None = None
    """What the table calls the servers of url and compare, comma-separated; null for host:port."""
    model: str | None = None
    """The model's name in requests; null for the first one of each server's /v1/models."""
    api: Api = Api.auto
    """completions or chat; auto is chat for conversations and for files with messages, else completions."""
    api_key: str | None = None
    """Bearer token to send; null reads LOWBIT_API_KEY, then OPENAI_API_KEY."""

    rate: str = "1,2,4"
    """Requests (conversations) a second, comma-separated; inf sends all at once, trace keeps the trace's own times,
    auto looks for the highest rate that keeps slo_share of the requests within ttft_ms, tpot_ms and e2e_ms."""
    concurrency: str | None = None
    """A closed loop instead of rates: so many requests at a time, comma-separated. It waits for a slow server and so
    hides what arrivals would have met; its rows say `closed`."""
    num_requests: int | None = None
    """Measured requests (conversations) of a point; null for 100, or duration_s times the rate."""
    duration_s: float | None = None
    """Length of a point at a given rate, in seconds, instead of num_requests."""
    arrivals: Arrivals = Arrivals.poisson
    """poisson, uniform (equal gaps) or gamma (`burstiness`). Gaps are scaled so that n requests take n / rate seconds,
    whatever the seed."""
    burstiness: float = 1.0
    """Shape of gamma's gaps: 1 is poisson, below is burstier, above more even."""
    trace: str | None = None
    """JSONL with `timestamp` and, where known, prompt or messages, input_len and output_len: arrivals are replayed."""
    timestamp_unit_s: float = 1.0
    """Seconds in a unit of the trace's timestamps; 0.001 for milliseconds."""
    warmup: int = 4
    """Requests (conversations) ahead of the measured ones, at the same rate, that no figure counts."""

    workload: Workload = Workload.random
    """random: words of the given lengths; prefix: groups that share their beginning; conversation: turns with the
    history; file: `prompts`."""
    prompts: str | None = None
    """JSONL with prompt or messages and, where known, output_len; for workload=file. Taken in turns."""
    input_len: str = "128"
    """Prompt tokens: 128, uniform:64:256 (both ends included) or lognormal:128:0.5[:1024] (median, sigma, largest)."""
    output_len: str = "64"
    """Tokens to ask for (max_tokens), likewise."""
    prefix_groups: int = 4
    """Prefixes that requests of workload=prefix share, drawn evenly."""
    prefix_len: int = 256
    """Tokens of such a prefix, in front of input_len tokens of its own."""
    turns: int = 3
    """Questions of a conversation."""
    think_time_s: float = 1.0
    """Mean seconds from an answer to the next question, exponential; 0 asks at once."""
    temperature: float = 0.0
    """Temperature of sampling; 0 is greedy."""
    ignore_eos: bool = True
    """Ask for answers of exactly output_len tokens (ignore_eos, min_tokens), where the server takes it."""
    extra_body: str | None = None
    """A JSON object with more fields for each request, e.g. '{"top_p": 0.9}'."""
    tokenizer: str | None = None
    """A folder or hub name to count tokens with; null for the server's own usage counts."""
    seed: int = 0
    """Seeds arrivals, lengths and prompts."""

    ttft_ms: float | None = None
    """SLO: longest time to the first token, in milliseconds; null for none."""
    tpot_ms: float | None = None
    """SLO: longest time per output token after the first, in milliseconds."""
    e2e_ms: float | None = None
    """SLO: longest time to the end of the answer, in milliseconds."""
    slo_share: float = 0.95
    """Share of requests that must be within the SLO for rate=auto to call a rate sustained."""
    start_rate: float = 1.0
    """rate=auto: where doubling begins."""
    max_rate: float = 1024.0
    """rate=auto: where doubling ends."""
    bisections: int = 4
    """rate=auto: points between the last rate that held and the first that did not."""

    timeout_s: float = 600.0
    """Longest wait for an answer; it is then an error of kind timeout."""
    max_late_ms: float = 5.0
    """A point is flagged if this client sent its requests later than this at p99, or its event loop lagged as much."""
    metrics_every_s: float = 0.5
    """How often /metrics is read during a point, where the server has it; 0 never."""
    price_per_hour: float | None = None
    """Price of the server's machine for an hour; tokens are priced with it."""
    reset_cache: bool = True
    """Empty the server's prefix cache ahead of each point; where it cannot be, prompts of different points differ."""
    out: str | None = None
    """Folder for bench_load.json and bench_load.csv."""
    quick: bool = False
    """Few requests (16 a point) and bisections (2), where these were not set."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_rates()
        require(bool(self.urls), f"url={self.url!r} names no server; give http://host:port")
        for url in (*self.urls, *self.compared_urls):
            require(_is_address(url), f"url={url}; give http://host:port, comma-separated")
        labels = self.labels
        require(
            self.names is None or len(labels) == len(self.urls) + len(self.compared_urls),
            f"names={self.names} has {len(labels)} names for {len(self.urls) + len(self.compared_urls)} servers",
        )
        require(len(set(labels)) == len(labels), f"names of servers repeat: {', '.join(labels)}; give names=a,b")
        self._check_files()
        require(_is_object(self.extra_body), f"extra_body={self.extra_body}; give a JSON object")
        if self.quick:
            self.num_requests = self.num_requests or (None if self.duration_s else QUICK_REQUESTS)
            self.bisections = min(self.bisections, QUICK_BISECTIONS)

    def _check_numbers(self) -> None:
        for name in ("burstiness", "timestamp_unit_s", "start_rate", "max_rate", "timeout_s", "max_late_ms"):
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)}; give more than 0")
        for name in ("num_requests", "duration_s", "ttft_ms", "tpot_ms", "e2e_ms"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{name}={value}; give more than 0, or null")
        for name in ("prefix_groups", "prefix_len", "turns"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)}; give at least 1")
        for name in ("warmup", "think_time_s", "temperature", "bisections", "metrics_every_s"):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)}; give 0 or more")
        require(0 < self.slo_share <= 1, f"slo_share={self.slo_share}; give a share in (0, 1]")
        require(
            self.num_requests is None or self.duration_s is None,
            f"num_requests={self.num_requests} and duration_s={self.duration_s} are both set; give one",
        )

    def _check_rates(self) -> None:
        if self.concurrency is not None:
            require(self.rate == type(self).rate, f"rate={self.rate} and concurrency={self.concurrency}; give one")
            require(self.trace is None, "concurrency is a closed loop and trace an open one; give one")
            require(self.duration_s is None, "concurrency has no rate to count duration_s in; give num_requests")
            require(all(n >= 1 for n in self.places), f"concurrency={self.concurrency}; give numbers of at least 1")
            return
        if self.rate == AUTO:
            require(
                any(bound is not None for bound in self.slo.values()),
                "rate=auto looks for the highest rate within an SLO; give ttft_ms, tpot_ms or e2e_ms",
            )
            return
        require(self.rate != TRACE or self.trace is not None, "rate=trace needs trace=<file with timestamps>")
        require(bool(self.rates), f"rate={self.rate!r}; give numbers above 0, inf, trace or auto")
        require(
            self.duration_s is None or self.trace is None,
            f"duration_s={self.duration_s}: trace has a length of its own; give num_requests for a part of it",
        )
        require(
            self.duration_s is None or all(rate and math.isfinite(rate) for rate in self.rates),
            f"duration_s={self.duration_s} and rate={self.rate}: give num_requests",
        )

    def _check_files(self) -> None:
        require(
            (self.workload == Workload.file) == (self.prompts is not None),
            f"workload={self.workload} and prompts={self.prompts}; workload=file goes with prompts=<JSONL file>",
        )
        for name in ("prompts", "trace"):
            path = getattr(self, name)
            require(path is None or Path(path).is_file(), f"{name}={path} is no file")
        for path in self.compared_files:
            require(Path(path).is_file(), f"compare={path} is neither http://host:port nor a file")
        require(
            self.workload != Workload.conversation or self.api != Api.completions,
            "workload=conversation has a history of messages; use api=chat",
        )

    @property
    def urls(self) -> list[str]:
        """The servers under load, without a slash at their ends."""
        return [url.rstrip("/") for url in _items(self.url)]

    @property
    def compared_urls(self) -> list[str]:
        return [item.rstrip("/") for item in _items(self.compare) if "://" in item]

    @property
    def compared_files(self) -> list[str]:
        return [item for item in _items(self.compare) if "://" not in item]

    @property
    def labels(self) -> list[str]:
        """A name for each server of url and compare."""
        return _items(self.names) or [url.partition("://")[2] for url in (*self.urls, *self.compared_urls)]

    @property
    def rates(self) -> list[float | None]:
        """Requests a second, None for the trace's own times; empty for rate=auto.

        raises  UserError
        """
        if self.rate == AUTO:
            return []
        return [None if item == TRACE else _positive("rate", item) for item in _items(self.rate)]

    @property
    def places(self) -> list[int]:
        """Requests at a time of a closed loop.

        raises  UserError
        """
        return [int(_positive("concurrency", item)) for item in _items(self.concurrency)]

    @property
    def slo(self) -> dict[str, float | None]:
        """Measure -> its bound in milliseconds."""
        return {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "e2e_ms": self.e2e_ms}

    def requests_at(self, rate: float | None) -> int:
        """Measured requests of a point at `rate` a second."""
        if self.duration_s is not None and rate:
            return max(1, round(self.duration_s * rate))
        return self.num_requests or 100


def _items(text: str | None) -> list[str]:
    return [item.strip() for item in (text or "").split(",") if item.strip()]


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or too large
        return False


def _is_object(text: str | None) -> bool:
    try:
        return text is None or isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _positive(key: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number > 0 or (key == "concurrency" and number % 1 != 0):
        raise UserError(f"{key} has {text!r}; give numbers above 0, comma-separated")
    return number
