"""Figures of one point, out of its outcomes.

    TTFT      first piece with text - due
    ITL       each gap between two pieces; where a piece carries several tokens, `tokens_per_piece` says so
    TPOT      (e2e - ttft) / (tokens - 1), tokens as the server counted them
    e2e       last byte - due
    goodput   share of measured requests that were answered within every bound of the SLO; a failed one was not

`due` is when the request was to be sent. Percentiles are linear between neighbours. Latencies are of whole answers;
errors stand beside them by kind.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

from trainer.config.load import LoadConfig
from trainer.evaluate.load.answer import Outcome
from trainer.evaluate.load.point import Run
from trainer.evaluate.load.server_metrics import server_figures
from trainer.evaluate.load.steady import Steady, peak_in_flight, steady_state

TPOT_DEFINITION = "TPOT = (e2e - TTFT) / (output tokens - 1)"
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def point_figures(
    run: Run, config: LoadConfig, *, is_open: bool, count: Callable[[str], int] | None = None
) -> dict[str, Any]:
    """Figures of a finished point, JSON-able; latencies in milliseconds, moments in seconds from its start.

    is_open  requests came when they were due; only then is there a queue to judge
    count    counts an answer's tokens where the server did not; None: a piece is a token
    """
    measured = [outcome for outcome in run.outcomes if not outcome.warmup]
    _count_tokens(run.outcomes, count)
    whole = [outcome for outcome in measured if outcome.error is None]
    steady = steady_state(run.outcomes) if is_open else None
    figures = {"requests": len(measured), "completed": len(whole), **_errors(measured)}
    figures |= latencies(whole) | _client(run) | _throughput(whole, measured) | _tokens(whole)
    figures |= _goodput(whole, measured, config) | _steady_figures(run, steady)
    figures["server_says"] = server_figures(run.pages, run.began)
    return figures | _energy(run) | _price(figures, config.price_per_hour)


def latencies(whole: list[Outcome]) -> dict[str, dict[str, float]]:
    """TTFT, ITL, TPOT and e2e of whole answers, each mean, p50, p90 and p99 in ms; {} where there is none."""
    measures = [request_ms(outcome) for outcome in whole]
    gaps = [1e3 * (after - before) for o in whole for before, after in zip(o.pieces_at, o.pieces_at[1:], strict=False)]
    named = {name: [m[name] for m in measures if m[name] is not None] for name in ("ttft_ms", "tpot_ms", "e2e_ms")}
    return {name: summary(values) for name, values in (named | {"itl_ms": gaps}).items()}


def request_ms(outcome: Outcome) -> dict[str, float | None]:
    """A whole answer's ttft_ms, tpot_ms (None below two tokens) and e2e_ms."""
    ttft, e2e = outcome.pieces_at[0] - outcome.due, outcome.ended - outcome.due
    tokens = outcome.output_tokens or 0
    return {
        "ttft_ms": 1e3 * ttft,
        "tpot_ms": 1e3 * (e2e - ttft) / (tokens - 1) if tokens > 1 else None,
        "e2e_ms": 1e3 * e2e,
    }


def summary(values: list[float]) -> dict[str, float]:
    """mean, p50, p90, p99 and max; {} of nothing."""
    if not values:
        return {}
    ordered = sorted(values)
    shares = {name: percentile(ordered, share) for name, share in SHARES.items()}
    return {"mean": statistics.fmean(ordered), **shares, "max": ordered[-1]}


def percentile(ordered: list[float], share: float) -> float:
    """Linear between neighbours, as numpy's default; `ordered` ascends and is not empty."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _count_tokens(outcomes: list[Outcome], count: Callable[[str], int] | None) -> None:
    for outcome in outcomes:
        if outcome.output_tokens is None:
            outcome.output_tokens = count(outcome.text) if count else len(outcome.pieces_at)


def _errors(measured: list[Outcome]) -> dict[str, Any]:
    """Errors by kind, and what the first of each said."""
    failed = [outcome for outcome in measured if outcome.error is not None]
    said = {outcome.error: outcome.message for outcome in reversed(failed)}
    return {"errors": dict(Counter(outcome.error for outcome in failed)), "errors_say": said}


def _client(run: Run) -> dict[str, Any]:
    """How late requests were sent, and how late the client's own clock ticked."""
    late = [1e3 * (outcome.sent - outcome.due) for outcome in run.outcomes]
    return {"late_ms": summary(late), "client_lag_ms": summary([1e3 * lag for lag in run.lags_s])}


def _throughput(whole: list[Outcome], measured: list[Outcome]) -> dict[str, float | None]:
    """Rates from the first measured arrival to the last answer."""
    span = max((o.ended for o in measured), default=0.0) - min((o.due for o in measured), default=0.0)
    outputs = sum(o.output_tokens for o in whole)
    known = all(o.prompt_tokens is not None for o in whole)
    total = outputs + sum(o.prompt_tokens for o in whole) if known else None
    return {
        "duration_s": span,
        "requests_per_s": len(whole) / span if span else 0.0,
        "output_tokens_per_s": outputs / span if span else 0.0,
        "total_tokens_per_s": total / span if span and total is not None else None,
    }


def _tokens(whole: list[Outcome]) -> dict[str, float | None]:
    """Means of a request's tokens as counted; asked: what max_tokens was."""

    def mean(values: list[float | None]) -> float | None:
        return statistics.fmean(values) if values and None not in values else None

    pieces = sum(len(o.pieces_at) for o in whole)
    cached, prompts = [o.cached_tokens for o in whole], [o.prompt_tokens for o in whole]
    known = bool(whole) and None not in (*cached, *prompts) and sum(prompts) > 0
    return {
        "input_tokens": mean(prompts),
        "output_tokens": mean([o.output_tokens for o in whole]),
        "asked_tokens": mean([o.asked_tokens for o in whole]),
        "tokens_per_piece": sum(o.output_tokens for o in whole) / pieces if pieces else None,
        "cached_share": sum(cached) / sum(prompts) if known else None,
    }


def _goodput(whole: list[Outcome], measured: list[Outcome], config: LoadConfig) -> dict[str, Any]:
    bounds = {name: bound for name, bound in config.slo.items() if bound is not None}
    if not bounds:
        return {"slo": {}, "goodput": None, "goodput_per_s": None}
    good = sum(_is_within(request_ms(outcome), bounds) for outcome in whole)
    span = _throughput(whole, measured)["duration_s"]
    share = good / len(measured) if measured else 0.0
    return {"slo": bounds, "goodput": share, "goodput_per_s": good / span if span else 0.0}


def _is_within(measures: dict[str, float | None], bounds: dict[str, float]) -> bool:
    return all(measures[name] is None or measures[name] <= bound for name, bound in bounds.items())


def _steady_figures(run: Run, steady: Steady | None) -> dict[str, Any]:
    figures: dict[str, Any] = {"in_flight_peak": peak_in_flight(run.outcomes), "saturated": None, "steady": None}
    if steady is None:
        return figures
    span, inside = steady.end - steady.start, [o for o in run.outcomes if steady.start <= o.ended <= steady.end]
    figures["saturated"] = steady.saturated
    figures["steady"] = {
        "window_s": [steady.start - run.began, steady.end - run.began],
        "in_flight": steady.in_flight,
        "growth_per_s": steady.growth_per_s,
        "growth_share": steady.growth_share,
        "requests_per_s": sum(o.error is None for o in inside) / span,
        "output_tokens_per_s": sum(_tokens_within(o, steady) for o in run.outcomes) / span,
    }
    return figures


def _tokens_within(outcome: Outcome, steady: Steady) -> float:
    if outcome.error is not None or not outcome.pieces_at:
        return 0.0
    pieces = sum(steady.start <= at <= steady.end for at in outcome.pieces_at)
    return outcome.output_tokens * pieces / len(outcome.pieces_at)


def _energy(run: Run) -> dict[str, Any]:
    """Joules by source, of warm-up and measured requests alike; None where nothing is readable."""
    tokens = sum(outcome.output_tokens for outcome in run.outcomes if outcome.error is None)
    joules = sum(run.joules.values()) / tokens if run.joules and tokens else None
    return {"energy_joules": run.joules or None, "joules_per_output_token": joules}


def _price(figures: dict[str, Any], per_hour: float | None) -> dict[str, float | None]:
    """Price of a million tokens: the machine's for an hour over the tokens of an hour at this load."""

    def per_million(tokens_per_s: float | None) -> float | None:
        return per_hour / (tokens_per_s * 3600) * 1e6 if per_hour is not None and tokens_per_s else None

    return {
        "price_per_million_output_tokens": per_million(figures["output_tokens_per_s"]),
        "price_per_million_tokens": per_million(figures["total_tokens_per_s"]),
    }
