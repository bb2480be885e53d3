"""Metrics: what GET /metrics tells, under vLLM's names where a figure means the same, `lowbit:` where it is ours.

The engine calls the small methods from its thread, several a step, so each is a few additions; the HTTP side only
renders. Everything about a request is counted once a request, not once an answer (n > 1), and token totals grow when a
request ends, however it ends: after a drain they are exact.
"""

from dataclasses import asdict, is_dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST
LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""From a cached prompt of a tiny model on a GPU to a long answer of a large one on a CPU."""
TOKEN_GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
LENGTH_BUCKETS = tuple(2**power for power in range(18))

_TOTALS = {
    "preempted_recompute": ("vllm:num_preemptions", {"kind": "recompute"}),
    "preempted_swap": ("vllm:num_preemptions", {"kind": "swap"}),
    "copies_on_write": ("lowbit:cow_copies", {}),
    "prefix_queries": ("vllm:prefix_cache_queries", {}),
    "prefix_hits": ("vllm:prefix_cache_hits", {}),
    "recomputed_tokens": ("lowbit:recomputed_tokens", {}),
    "swapped_out_blocks": ("lowbit:swapped_blocks", {"direction": "out"}),
    "swapped_in_blocks": ("lowbit:swapped_blocks", {"direction": "in"}),
    "drafted": ("vllm:spec_decode_num_draft_tokens", {}),
    "accepted": ("vllm:spec_decode_num_accepted_tokens", {}),
}
"""Totals that the scheduler keeps itself: its field -> (metric, labels)."""


class Metrics:
    """The server's figures in a registry of their own, so that two engines in a process do not mix."""

    def __init__(self, model_name: str = "") -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self._seen: dict[str, float] = {}
        self._running = self._gauge("vllm:num_requests_running", "Sequences in the running batch.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Sequences that wait for a place.")
        self._usage = self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self._adapters = Gauge(
            "vllm:lora_requests_info",
            "Adapters that can be named as a model.",
            ["running_lora_adapters", "max_lora"],
            registry=self.registry,
        )
        self._make_counters()
        self._make_histograms()

    def _make_counters(self) -> None:
        self._arrivals = self._counter("lowbit:requests", "Requests that were accepted.")
        self._rejections = self._counter("vllm:admission_rejections", "Requests refused because the queue was full.")
        self._finished = self._raw_counter("vllm:request_success", "Finished requests.", ["finished_reason"])
        self._prompt_total = self._counter("vllm:prompt_tokens", "Prompt tokens of finished requests.")
        self._generation_total = self._counter("vllm:generation_tokens", "Tokens generated for finished requests.")
        help_texts = {
            "vllm:num_preemptions": "Running sequences that lost their KV blocks, by what happened to them.",
            "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache, on first admission.",
            "vllm:prefix_cache_hits": "Prompt tokens found in the prefix cache, on first admission.",
            "vllm:spec_decode_num_draft_tokens": "Tokens that prompt lookup proposed.",
            "vllm:spec_decode_num_accepted_tokens": "Proposed tokens that the model confirmed.",
            "lowbit:cow_copies": "KV blocks copied because a sequence wrote into a shared one.",
            "lowbit:recomputed_tokens": "Tokens computed again after a preemption.",
            "lowbit:swapped_blocks": "KV blocks moved between cache and host memory.",
        }
        names = {name: list(labels) for name, labels in _TOTALS.values()}
        counters = {name: self._raw_counter(name, help_texts[name], labels) for name, labels in names.items()}
        self._totals = {
            field: counters[name].labels(**self._labels, **labels) for field, (name, labels) in _TOTALS.items()
        }

    def _make_histograms(self) -> None:
        histogram = self._histogram
        self._ttft = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self._queue = histogram("vllm:request_queue_time_seconds", "From arrival to the first scheduled step.")
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.")
        self._gap = histogram(
            "vllm:inter_token_latency_seconds", "Between tokens of a sequence, the first aside.", TOKEN_GAP_BUCKETS_S
        )
        self._step = histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", LENGTH_BUCKETS)
        self._prompt_len = histogram("vllm:request_prompt_tokens", "Prompt tokens a request.", LENGTH_BUCKETS)
        self._generation_len = histogram(
            "vllm:request_generation_tokens", "Generated tokens a request, all answers together.", LENGTH_BUCKETS
        )
        self._n = histogram("vllm:request_params_n", "Answers asked for.", (1, 2, 4, 8, 16, 32, 64, 128))

    # ---- what the engine reports

    def arrival(self) -> None:
        """A request was accepted."""
        self._arrivals.inc()

    def rejected(self) -> None:
        """A request was refused because the queue is full."""
        self._rejections.inc()

    def first_token(self, ttft_s: float, queue_s: float) -> None:
        """A request's first token: seconds since arrival, and how many of them it waited."""
        self._ttft.observe(ttft_s)
        self._queue.observe(queue_s)

    def tokens(self, inter_token_s: float, num_tokens: int = 1) -> None:
        """Later tokens of a sequence: seconds a token since the ones before."""
        for _ in range(num_tokens):
            self._gap.observe(inter_token_s)

    def step(self, num_tokens: int) -> None:
        """A step computed so many tokens."""
        self._step.observe(num_tokens)

    def finished(self, reason: str, prompt_tokens: int, generation_tokens: int, e2e_s: float, n: int) -> None:
        """A request ended; `generation_tokens` of all its answers together."""
        self._finished.labels(**self._labels, finished_reason=str(reason)).inc()
        self._prompt_total.inc(prompt_tokens)
        self._generation_total.inc(generation_tokens)
        self._e2e.observe(e2e_s)
        self._prompt_len.observe(prompt_tokens)
        self._generation_len.observe(generation_tokens)
        self._n.observe(n)

    def gauges(self, running: int, waiting: int, usage: float) -> None:
        """The present state: sequences running and waiting, share of KV blocks in use."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._usage.set(usage)

    def counts(self, totals: Any) -> None:
        """Totals since the start (a dataclass or dict with the fields of `_TOTALS`, or some of them)."""
        for field, value in (asdict(totals) if is_dataclass(totals) else totals).items():
            if grown := value - self._seen.get(field, 0):
                self._totals[field].inc(grown)
                self._seen[field] = value

    # ---- what changes rarely

    def cache_config(self, **settings: object) -> None:
        """Tell the cache's settings as labels, once."""
        names = sorted(settings)
        gauge = Gauge("vllm:cache_config_info", "Settings of the KV cache.", names, registry=self.registry)
        gauge.labels(**{name: str(settings[name]) for name in names}).set(1)

    def adapters(self, names: list[str], max_loras: int) -> None:
        """Tell which adapters are loaded; call when that changes."""
        self._adapters.clear()
        self._adapters.labels(",".join(sorted(names)), str(max_loras)).set_to_current_time()

    def render(self) -> bytes:
        """All figures as Prometheus text."""
        return generate_latest(self.registry)

    # ---- making them

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _raw_counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(name, text, [*self._labels, *labels], registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return self._raw_counter(name, text, []).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS_S) -> Histogram:
        return Histogram(name, text, list(self._labels), registry=self.registry, buckets=buckets).labels(**self._labels)
