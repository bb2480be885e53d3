"""The load tester against a server whose every moment is known, and its rules as functions."""

import asyncio
import csv
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.fake_engine import FakeEngine, serving
from tests.serve.known_server import KnownServer
from trainer.config.errors import UserError
from trainer.config.load import Arrivals, LoadConfig
from trainer.evaluate.load.answer import AnswerReader, Outcome
from trainer.evaluate.load.arrivals import arrival_times, replayed_times
from trainer.evaluate.load.client import Client
from trainer.evaluate.load.energy import EnergyMeter
from trainer.evaluate.load.framing import Exchange, HttpError
from trainer.evaluate.load.lengths import read_lengths
from trainer.evaluate.load.measures import percentile, point_figures, summary
from trainer.evaluate.load.point import TICK_S, Run, run_point
from trainer.evaluate.load.probe import probe
from trainer.evaluate.load.report import compared_rows, read_rows, sustained_rows
from trainer.evaluate.load.run import load_servers
from trainer.evaluate.load.server_metrics import server_figures
from trainer.evaluate.load.steady import steady_state
from trainer.evaluate.load.sweep import Load, loads
from trainer.evaluate.load.texts import TextMaker, from_counts, from_tokenizer
from trainer.evaluate.load.workload import Workloads

ROOT = Path(__file__).parent.parent.parent
SMALL = {
    **{"rate": "100", "num_requests": 12, "warmup": 2, "input_len": "8", "output_len": "4", "metrics_every_s": 0.0},
    "timeout_s": 60.0,  # of an answer; a test that waits for it has failed
}


def config_of(server: KnownServer, **changes) -> LoadConfig:
    return LoadConfig(url=server.url, **{**SMALL, **changes})


def rows_of(server: KnownServer, **changes) -> list[dict]:
    async def run() -> list[dict]:
        async with server.running():
            return await load_servers(config_of(server, **changes))

    return asyncio.run(run())


def run_of(server: KnownServer, **changes) -> tuple[Run, LoadConfig]:
    """The outcomes of one point, before they are figures."""

    async def run() -> tuple[Run, LoadConfig]:
        async with server.running():
            config = config_of(server, **changes)
            client = Client(server.url)
            found = await probe("known", client, config, chat=False, maker=None)
            places = config.places[0] if config.concurrency else None
            rate = math.inf if places else config.rates[0]
            jobs = Workloads(config).jobs(rate, found.maker, chat=False, salt="")
            result = await run_point(found, jobs, config, salt="", places=places)
            client.close()
            return result, config

    return asyncio.run(run())


def pairs_of(server: KnownServer, run: Run) -> list[tuple[Outcome, object]]:
    """Measured outcomes beside what the server wrote down; its answers begin with their number."""
    pairs = [(o, server.served[int(o.text.partition("né")[0])]) for o in run.outcomes if not o.warmup]
    assert len({id(served) for _, served in pairs}) == len(pairs)
    return pairs


def tolerance_ms(run: Run) -> float:
    """How far the client can be behind the server's log. Had more time than a tick passed between a write and its
    reading, then the client's clock came due in it, and shows the rest as its lag; 5 ms for one turn of the loop."""
    return 1e3 * (max(run.lags_s, default=0.0) + TICK_S) + 5


# ---- what is measured is what the server did


@pytest.mark.parametrize("pieces", [1, 4], ids=["token_a_piece", "four_tokens_a_piece"])
def test_percentiles_are_those_of_the_servers_log(pieces):
    server = KnownServer(ttft_s=0.1, gap_s=0.004, tokens_per_piece=pieces, cut_into=7, numbered=True)
    run, config = run_of(server, rate="60", num_requests=40, output_len="16")
    figures = point_figures(run, config, is_open=True)
    pairs, tokens = pairs_of(server, run), 16
    logged = {
        "ttft_ms": [1e3 * (s.written[0] - o.due) for o, s in pairs],
        "e2e_ms": [1e3 * (s.ended - o.due) for o, s in pairs],
        "tpot_ms": [1e3 * (s.ended - s.written[0]) / (tokens - 1) for _, s in pairs],
        "itl_ms": [1e3 * (b - a) for _, s in pairs for a, b in zip(s.written, s.written[1:], strict=False)],
    }
    for name, values in logged.items():
        for share, value in summary(values).items():
            assert abs(figures[name][share] - value) <= tolerance_ms(run), (name, share)
    assert figures["ttft_ms"]["p50"] >= 100  # the server never sleeps less than it was told to
    assert figures["completed"] == figures["requests"] == 40
    assert figures["tokens_per_piece"] == pieces
    assert figures["output_tokens"] == tokens and figures["input_tokens"] == 8


def test_first_token_is_the_first_with_text_also_in_chats():
    """The role that opens a chat's stream is no token: TTFT has the server's wait in it."""
    server = KnownServer(ttft_s=0.05)
    (row,) = rows_of(server, api="chat")
    assert row["ttft_ms"]["p50"] >= 50 and row["completed"] == 12


def test_a_slow_accept_is_latency():
    server = KnownServer(accept_delay_s=0.02)
    run, config = run_of(server, rate="inf", num_requests=10, warmup=0)
    figures = point_figures(run, config, is_open=True)
    # The probe's connection is used again; the others queue for the door, the last one behind all of their delays.
    assert server.connections >= 5 and figures["ttft_ms"]["max"] >= (server.connections - 1) * 20
    assert figures["late_ms"]["max"] < figures["ttft_ms"]["max"] / 2  # it was the server, not the client


def test_open_loop_shows_a_stall_that_a_closed_loop_hides():
    """Coordinated omission: 2 s of silence meet 120 of 60 requests a second; a closed loop sends one in that time."""
    run, config = run_of(KnownServer(stall=(0.2, 2.0)), rate="60", num_requests=130)
    figures = point_figures(run, config, is_open=True)
    assert figures["ttft_ms"]["p99"] > 0.9 * 2000
    assert figures["ttft_ms"]["p50"] > 0.3 * 2000  # nine tenths of the requests are due while it lasts


def test_closed_loop_meets_a_stall_once_and_says_what_it_is():
    server = KnownServer(stall=(0.1, 1.0), ttft_s=0.002)
    (row,) = rows_of(server, rate=LoadConfig.rate, concurrency="1", num_requests=60)
    assert row["ttft_ms"]["max"] > 800 and row["ttft_ms"]["p90"] < 500
    assert row["loop"] == "closed" and "closed" in row["load"]
    assert any("closed loop" in note for note in row["notes"])


def test_closed_loop_keeps_to_its_places():
    server = KnownServer(ttft_s=0.01)
    run, _ = run_of(server, rate=LoadConfig.rate, concurrency="3", num_requests=12)
    steps = sorted([(o.sent, 1) for o in run.outcomes] + [(o.ended, -1) for o in run.outcomes])
    assert max(np.cumsum([step for _, step in steps])) == 3


def test_a_late_client_is_flagged():
    """Each request blocks the loop that client and server share for 30 ms: later ones go out late."""
    server = KnownServer(blocks_loop_s=0.03)
    (row,) = rows_of(server, rate="200")
    assert row["late_ms"]["p99"] > 5
    assert any(note.startswith("CLIENT LATE: this client sent") for note in row["notes"])


# ---- a queue that grows


def test_a_server_over_its_capacity_is_found_out():
    server = KnownServer(places=1, ttft_s=0.03)
    (row,) = rows_of(server, rate="120", num_requests=80, output_len="1")
    took = max(s.ended for s in server.served) - min(s.received for s in server.served)
    assert len(server.served) / took < 1 / 0.03  # it could not keep up, by its own log
    assert row["saturated"] is True and row["steady"]["growth_share"] > 0.5
    assert any(note.startswith("OVER-SATURATED") for note in row["notes"])


def outcomes_of_queue(load: float, seed: int, num: int = 400) -> list[Outcome]:
    """Poisson arrivals at `load` times what a server with services of 1 s can take."""
    free, outcomes = 0.0, []
    for due in arrival_times(Arrivals.poisson, num, rate=load, burstiness=1.0, draw=Random(seed)):
        free = max(free, due) + 1.0
        outcomes.append(Outcome(due, 1, ended=free))
    return outcomes


def test_saturation_is_told_from_chance():
    """A queue at half of its capacity has bursts and no trend; one above it always grows."""
    calm = [steady_state(outcomes_of_queue(0.5, seed)).saturated for seed in range(40)]
    over = [steady_state(outcomes_of_queue(1.3, seed)).saturated for seed in range(40)]
    assert sum(calm) <= 2 and all(over)
    shares = [steady_state(outcomes_of_queue(1.5, seed)).growth_share for seed in range(40)]
    assert abs(statistics.mean(shares) - 1 / 3) < 0.05  # of 1.5 arrivals 0.5 are not served


def test_a_run_shorter_than_its_answers_says_nothing_about_queues():
    outcomes = [Outcome(i / 10, 1, ended=i / 10 + 60) for i in range(100)]
    assert steady_state(outcomes) is None


def test_in_flight_of_a_constant_load():
    """Ten a second that take half a second each: five in flight, none piles up."""
    steady = steady_state([Outcome(i / 10, 1, ended=i / 10 + 0.5) for i in range(200)])
    assert steady.in_flight == pytest.approx(5) and not steady.saturated
    assert steady.start == pytest.approx(0.5) and steady.end == pytest.approx(19.9)


# ---- what goes wrong


@pytest.mark.parametrize(
    "fault, kind, says",
    [
        ("error", "stream", "the GPU fell off the bus"),
        ("garbage", "stream", "no JSON"),
        ("cut", "cut off", "connection ended"),
        ("status", "http 429", "the queue is full"),
        ("silent", "timeout", "timeout_s=0.4"),
        ("empty", "empty", "no piece"),
    ],
)
def test_errors_are_counted_by_kind(fault, kind, says):
    server = KnownServer(fault=fault)
    (row,) = rows_of(server, warmup=0, num_requests=12, timeout_s=0.4 if fault == "silent" else 60.0, ttft_ms=30000)
    assert row["errors"] == {kind: 4} and says in row["errors_say"][kind]
    assert row["completed"] == 8 and row["goodput"] == pytest.approx(8 / 12)  # a failed request was not in time
    assert any(f"4 x {kind}" in note for note in row["notes"])


def test_a_wrong_model_is_a_row_with_what_the_server_said():
    (row,) = rows_of(KnownServer(), model="gpt-5")
    assert row["errors"] == {"http 404": 1} and row["completed"] == 0
    assert "`gpt-5` does not exist" in row["notes"][0] and "known" in row["notes"][0]


def test_an_unreachable_server_is_a_row_and_others_go_on():
    server = KnownServer()

    async def run() -> list[dict]:
        async with server.running():
            return await load_servers(LoadConfig(url=f"http://127.0.0.1:1,{server.url}", **SMALL))

    rows = asyncio.run(run())
    assert [row["completed"] for row in rows] == [0, 12]
    assert list(rows[0]["errors"]) == ["connect"] and "is a server running" in rows[0]["notes"][0]


def test_a_server_that_goes_away_leaves_errors_not_tracebacks():
    """Probed, then gone: each request is refused."""

    async def run() -> Run:
        server = KnownServer()
        async with server.running():
            config = config_of(server)
            found = await probe("known", Client(server.url), config, chat=False, maker=None)
        jobs = Workloads(config).jobs(100.0, found.maker, chat=False, salt="")
        return await run_point(found, jobs, config, salt="", places=None)

    figures = point_figures(asyncio.run(run()), LoadConfig(**SMALL), is_open=True)
    assert figures["completed"] == 0 and sum(figures["errors"].values()) == 12
    assert set(figures["errors"]) <= {"connect", "cut off"}
    json.dumps(figures, allow_nan=False)


# ---- what a server takes


def test_fields_that_are_refused_are_left_out_and_named():
    server = KnownServer(refused=("min_tokens", "stream_options"))
    (row,) = rows_of(server)
    assert row["completed"] == 12 and row["counted_by"] == "pieces"
    assert {"ignore_eos", "min_tokens", "stream_options"} & set(server.served[-1].body) == {"ignore_eos"}


def test_usage_is_counted_by_pieces_or_a_tokenizer_where_the_server_does_not():
    server = KnownServer(tells_usage=False, tokens_per_piece=2, piece="one two ")
    (row,) = rows_of(server)
    assert row["counted_by"] == "pieces" and row["output_tokens"] == 2 and row["total_tokens_per_s"] is None
    figures = point_figures(run_of(server)[0], LoadConfig(**SMALL), is_open=True, count=lambda text: len(text.split()))
    assert figures["output_tokens"] == 4


def test_early_ends_are_told():
    server = KnownServer(tells_usage=False, tokens_per_piece=2)
    (row,) = rows_of(server)
    assert any("ended early: 2.0 tokens of the 4.0" in note for note in row["notes"])


def test_extra_fields_and_temperature_reach_the_server():
    server = KnownServer()
    rows_of(server, extra_body='{"top_p": 0.5}', temperature=0.7, ignore_eos=False)
    body = server.served[0].body
    assert body["top_p"] == 0.5 and body["temperature"] == 0.7 and "ignore_eos" not in body and body["max_tokens"] == 4


@pytest.mark.parametrize("resets", ["/reset_prefix_cache", "/flush_cache"])
def test_cache_is_emptied_ahead_of_each_point(resets):
    server = KnownServer(resets=resets)
    rows = rows_of(server, rate="100,200")
    assert server.num_resets == 1 + 2  # found once, then a point each
    assert [row["prefix_cache"] for row in rows] == ["emptied"] * 2
    prompts = [served.body["prompt"] for served in server.served]
    assert sorted(prompts[:14]) == sorted(prompts[14:])  # so rates compare; requests may overtake on their way


def test_points_are_kept_apart_where_the_cache_stays():
    server, ours = KnownServer(), KnownServer(metrics="# TYPE vllm:num_requests_running gauge\n")
    rows_of(server, rate="100,200")
    prompts = [served.body["prompt"] for served in server.served]
    assert len(set(prompts)) == 28
    rows_of(ours, rate="100,200")
    salts = [served.body["cache_salt"] for served in ours.served]
    assert len(set(salts)) == 2 and salts[:14] == salts[:1] * 14
    kept = KnownServer()
    rows_of(kept, rate="100,200", reset_cache=False)
    assert len({served.body["prompt"] for served in kept.served}) == 14


def test_our_own_server_takes_everything(tokenizer):
    """Streams with usage, ignore_eos, min_tokens, cache_salt, /metrics: nothing is refused."""
    with serving(FakeEngine(tokenizer)) as url:
        (row,) = asyncio.run(load_servers(LoadConfig(url=url, **{**SMALL, "metrics_every_s": 0.05, "output_len": "8"})))
    assert row["completed"] == 12 and row["counted_by"] == "server" and row["output_tokens"] == 8
    assert row["server_says"]["preemptions"] == 0 and row["prefix_cache"] == "kept apart"
    assert not any("refuses" in note for note in row["notes"])


# ---- workloads


def test_conversations_carry_their_history():
    server = KnownServer(ttft_s=0.002)
    (row,) = rows_of(
        server, workload="conversation", turns=3, think_time_s=0.02, num_requests=4, warmup=1, rate="50", input_len="9"
    )
    assert row["requests"] == row["completed"] == 12 and len(server.served) == 15
    last = [served.body["messages"] for served in server.served if len(served.body["messages"]) == 5]
    assert len(last) == 5
    for messages in last:
        assert [message["role"] for message in messages] == ["user", "assistant"] * 2 + ["user"]
        assert messages[1]["content"] == messages[3]["content"] == "né " * 4
        turns = [next(s for s in server.served if s.body["messages"] == messages[:n]) for n in (1, 3, 5)]
        assert all(after.received > before.ended for before, after in zip(turns, turns[1:], strict=False))
    assert row["late_ms"]["p50"] < 1000 * 0.02 + row["client_lag_ms"]["max"]  # thinking is no lateness


def test_shared_prefixes_are_shared():
    server = KnownServer()
    (row,) = rows_of(server, workload="prefix", prefix_groups=2, prefix_len=20, num_requests=20)
    prefixes = [tuple(served.body["prompt"].split()[:20]) for served in server.served]
    assert len(set(prefixes)) == 2
    assert row["input_tokens"] == 20 + 8  # the template's three are in the 8


def test_prompts_of_a_file_are_taken_in_turns(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a b"}\n\n{"messages": [{"role": "user", "content": "c"}], "output_len": 2}\n')
    server = KnownServer(resets="/flush_cache")
    (row,) = rows_of(server, workload="file", prompts=str(path), num_requests=4, warmup=0)
    asked = [(s.body["messages"][0]["content"], s.body["max_tokens"]) for s in server.served]
    assert row["completed"] == 4 and asked.count(("a b", 4)) == 2  # a max_tokens of 2 looks like a probe to the server


def test_messages_are_for_chats(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "c"}]}\n')
    with pytest.raises(UserError, match="use api=chat"):
        rows_of(KnownServer(), workload="file", prompts=str(path), api="completions")


def test_a_trace_is_replayed(tmp_path):
    path = tmp_path / "trace.jsonl"
    moments = [5000, 5010, 5100, 5105, 5200]
    lines = [{"timestamp": moment, "input_length": 7 + i, "output_length": 3 + i} for i, moment in enumerate(moments)]
    path.write_text("\n".join(map(json.dumps, lines)))
    server = KnownServer(resets="/flush_cache")
    run, _ = run_of(server, trace=str(path), timestamp_unit_s=0.001, rate="trace", num_requests=None, warmup=0)
    dues = [outcome.due - run.began for outcome in run.outcomes]
    assert dues == pytest.approx([0, 0.01, 0.1, 0.105, 0.2])
    served = sorted((len(s.body["prompt"].split()) + 3, s.body["max_tokens"]) for s in server.served)
    assert served == [(7 + i, 3 + i) for i in range(5)]


@pytest.mark.parametrize(
    "line, says",
    [
        ("[1]", "line 1 is no JSON object"),
        ("{", "line 1 is no JSON object"),
        ('{"prompt": ""}', 'give "prompt"'),
        ('{"messages": [1]}', 'give "prompt"'),
        ('{"prompt": "a", "output_len": 0}', "output_len=0"),
        ("", "has no rows"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, line, says):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=says):
        Workloads(LoadConfig(workload="file", prompts=str(path)))


def test_a_file_in_another_encoding_is_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(UserError, match="prompts.jsonl is no UTF-8"):
        Workloads(LoadConfig(workload="file", prompts=str(path)))


def test_a_trace_without_timestamps_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1}\n{"timestamp": "2"}\n')
    with pytest.raises(UserError, match="line 2: timestamp='2'"):
        Workloads(LoadConfig(trace=str(path), rate="trace"))


# ---- arrivals and lengths


@given(
    kind=st.sampled_from(Arrivals),
    num=st.integers(1, 200),
    rate=st.floats(0.01, 1e4),
    burstiness=st.floats(0.2, 20),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_every_seed_fills_the_same_time(kind, num, rate, burstiness, seed):
    times = arrival_times(kind, num, rate=rate, burstiness=burstiness, draw=Random(seed))
    assert len(times) == num and times[-1] == pytest.approx(num / rate)
    assert times == sorted(times) and times[0] >= 0


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 9.0])
def test_gamma_gaps_have_their_variation(burstiness):
    times = arrival_times(Arrivals.gamma, 20_000, rate=1.0, burstiness=burstiness, draw=Random(0))
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)  # 20,000 gaps: 2 % at one sigma


def test_poisson_gaps_are_exponential():
    gaps = np.diff(arrival_times(Arrivals.poisson, 20_000, rate=2.0, burstiness=1.0, draw=Random(1)))
    assert (gaps > 0.5).mean() == pytest.approx(math.exp(-1), abs=0.02)


def test_all_at_once():
    assert arrival_times(Arrivals.poisson, 3, rate=math.inf, burstiness=1.0, draw=Random(0)) == [0, 0, 0]


def test_traces_are_stretched_and_checked():
    assert replayed_times([10, 11, 14], unit_s=0.5, rate=None) == [0, 0.5, 2]
    assert replayed_times([10, 11, 14], unit_s=1, rate=1.0) == [0, 0.75, 3]
    with pytest.raises(UserError, match="timestamp 3 is earlier"):
        replayed_times([10, 11, 9], unit_s=1, rate=None)
    with pytest.raises(UserError, match="all timestamps are 1"):
        replayed_times([1, 1], unit_s=1, rate=2.0)


def test_lengths():
    draw = Random(0)
    assert {read_lengths("input_len", "7")(draw) for _ in range(5)} == {7}
    assert {read_lengths("input_len", "uniform:2:4")(draw) for _ in range(100)} == {2, 3, 4}
    drawn = [read_lengths("input_len", "lognormal:100:0.5:300")(draw) for _ in range(4000)]
    assert max(drawn) == 300 and statistics.median(drawn) == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("text", ["", "0", "a", "uniform:4", "uniform:4:2", "lognormal:0:1", "normal:1:2", "1:2"])
def test_wrong_lengths_are_refused(text):
    with pytest.raises(UserError, match="output_len="):
        read_lengths("output_len", text)


def test_texts_have_their_tokens(tokenizer):
    assert len(TextMaker().text(50, Random(0)).split()) == 50
    maker = from_counts((8, 23), (72, 151))  # two tokens a word, seven of a template
    assert maker.tokens_per_word == 2 and maker.overhead == 7
    assert len(maker.text(107, Random(0)).split()) == 50 and len(maker.text(100, Random(0), own=True).split()) == 50
    assert maker.text(1, Random(0))  # no shorter than a word
    made, count = from_tokenizer(tokenizer.name_or_path, chat=False)
    text = made.text(60, Random(0))
    assert 50 <= count(text) <= 60  # a token a byte: the largest number of whole words
    with pytest.raises(UserError, match="tokenizer=/nowhere"):
        from_tokenizer("/nowhere", chat=False)


def test_jobs_are_the_same_for_every_rate_and_server():
    workloads = Workloads(LoadConfig(input_len="uniform:4:40", num_requests=30))
    slow, fast = (workloads.jobs(rate, TextMaker(), chat=False, salt="") for rate in (1.0, 8.0))
    salted = workloads.jobs(1.0, TextMaker(), chat=False, salt="x")
    assert [job.turns for job in slow] == [job.turns for job in fast] != [job.turns for job in salted]
    assert [job.due_s for job in slow] == pytest.approx([8 * job.due_s for job in fast])
    lengths = [[len(job.turns[0].prompt.split()) for job in jobs] for jobs in (slow, salted)]
    assert lengths[0] == lengths[1]
    assert [job.warmup for job in slow] == [True] * 4 + [False] * 30


# ---- which loads


def sustained(capacity: float, **changes) -> tuple[list[float], float]:
    config = LoadConfig(rate="auto", ttft_ms=1.0, **changes)
    search, rates, answer = loads(config), [], None
    while True:
        try:
            load = search.send(answer)
        except StopIteration:
            return rates, max((rate for rate in rates if rate <= capacity), default=0.0)
        rates.append(load.rate)
        answer = load.rate <= capacity


@pytest.mark.parametrize("capacity", [0.3, 1.0, 5.3, 40.0, 1000.0])
def test_search_finds_the_last_rate_that_holds(capacity):
    rates, best = sustained(capacity, bisections=6)
    assert best <= capacity < best * (1 + 2**-5)
    assert len(rates) <= 6 + 12


def test_search_ends():
    assert sustained(math.inf, max_rate=8.0) == ([1, 2, 4, 8], 8)
    assert sustained(0.0) == ([1 / 2**i for i in range(7)], 0.0)


def test_search_among_real_points():
    """One server answers everything in time; the other refuses a third of the requests at every rate."""
    config = {"rate": "auto", "ttft_ms": 30000.0, "start_rate": 200.0, "max_rate": 900.0, "num_requests": 6}
    rows = rows_of(KnownServer(), **config)
    assert [row["rate"] for row in rows] == [200, 400, 800]
    assert sustained_rows(rows, LoadConfig(**{**SMALL, **config}))[0]["rate"] == 800
    rows = rows_of(KnownServer(fault="status"), **config | {"start_rate": 800.0}, warmup=0)
    assert [row["rate"] for row in rows] == [800 / 2**i for i in range(7)]
    assert sustained_rows(rows, LoadConfig(**{**SMALL, **config}))[0]["rate"] is None


def test_names_of_loads():
    assert [Load(2.5).name, Load(math.inf).name, Load(None).name] == ["2.5", "all at once", "trace"]


# ---- figures


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_percentiles_are_numpys(values, share):
    assert percentile(sorted(values), share) == pytest.approx(np.quantile(values, share), rel=1e-9, abs=1e-6)


def finished(due: float, first: float, ended: float, tokens: int) -> Outcome:
    step = (ended - first) / (tokens - 1) if tokens > 1 else 0.0
    pieces = [first + i * step for i in range(tokens)]
    return Outcome(due, tokens, sent=due, ended=ended, pieces_at=pieces, output_tokens=tokens, prompt_tokens=10)


def test_figures_by_hand():
    run = Run([finished(0, 1, 3, 5), finished(2, 4, 5, 11), finished(4, 4.5, 5, 1), Outcome(5, 5, ended=6, error="x")])
    config = LoadConfig(ttft_ms=1500, e2e_ms=2500, price_per_hour=3.6)
    figures = point_figures(run, config, is_open=True)
    assert figures["ttft_ms"]["p50"] == 1000 and figures["ttft_ms"]["mean"] == pytest.approx(3500 / 3)
    assert figures["tpot_ms"]["mean"] == pytest.approx((500 + 100) / 2)  # one token has none
    assert figures["itl_ms"]["mean"] == pytest.approx((4 * 500 + 10 * 100) / 14)
    assert figures["duration_s"] == 6 and figures["output_tokens_per_s"] == pytest.approx(17 / 6)
    assert figures["total_tokens_per_s"] == pytest.approx(47 / 6)
    assert figures["goodput"] == 1 / 4  # the first one is too long, the second too late, the last failed
    assert figures["price_per_million_output_tokens"] == pytest.approx(3.6 / (17 / 6 * 3600) * 1e6)
    assert figures["in_flight_peak"] == 2 and figures["saturated"] is None


def test_metrics_of_several_servers():
    before = b'vllm:prefix_cache_queries_total{m="a"} 100\nvllm:prefix_cache_hits_total{m="a"} 10\n'
    after = (
        b'vllm:prefix_cache_queries_total{m="a"} 300\nvllm:prefix_cache_hits_total{m="a"} 110\n'
        b'vllm:num_preemptions_total{kind="swap"} 2\nvllm:num_preemptions_total{kind="recompute"} 3\n'
        b"vllm:num_requests_waiting 7\nvllm:kv_cache_usage_perc 0.25\nvllm:junk x\n"
    )
    said = server_figures([(1.0, before), (2.0, after), (3.0, after)], began=1.0)
    assert said["prefix_hit_rate"] == 0.5 and said["preemptions"] == 5
    assert said["kv_usage_peak"] == 0.25 and said["waiting_over_time"] == [[1.0, 7.0], [2.0, 7.0]]
    sglang = server_figures([(0.0, b"sglang:token_usage 0.5\nsglang:cache_hit_rate 0.75\n")], began=0.0)
    assert sglang["kv_usage_peak"] == 0.5 and sglang["prefix_hit_rate"] == 0.75 and sglang["preemptions"] is None
    assert server_figures([], began=0.0) == {}


def test_metrics_are_read_during_a_point():
    server = KnownServer(metrics="# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting 3\n", ttft_s=0.05)
    (row,) = rows_of(server, metrics_every_s=0.02)
    assert row["server_says"]["waiting_peak"] == 3 and len(row["server_says"]["waiting_over_time"]) > 2


def test_energy_is_read_where_it_can_be(tmp_path, monkeypatch):
    zone = tmp_path / "rapl" / "intel-rapl:0"
    (zone / "intel-rapl:0:0").mkdir(parents=True)
    (zone / "max_energy_range_uj").write_text("10000000")
    (zone / "energy_uj").write_text("9000000")
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nwhile :; do printf '100.0\\n150.0\\n'; sleep 0.1; done\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    async def run() -> tuple[dict[str, float], float]:
        loop = asyncio.get_running_loop()
        async with EnergyMeter(rapl=tmp_path / "rapl") as meter:
            began = loop.time()
            await asyncio.sleep(0.8)
            (zone / "energy_uj").write_text("2000000")
            return meter, loop.time() - began

    meter, seconds = asyncio.run(run())
    assert meter.joules["RAPL, processor packages"] == pytest.approx(3.0)  # over the counter's range
    # Two GPUs of 250 W together; readings start late and end early, never the other way round.
    assert 0 < meter.joules["nvidia-smi, all GPUs"] < 250 * (seconds + 1)


def test_no_energy_without_a_reading(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))

    async def run() -> EnergyMeter:
        async with EnergyMeter(rapl=tmp_path) as meter:
            return meter

    assert asyncio.run(run()).joules == {}


# ---- HTTP and streams, byte by byte


async def _exchange(data: bytes, sizes: int) -> tuple[bytes, int]:
    body = bytearray()
    exchange = Exchange(lambda piece, now: body.extend(piece))
    for start in range(0, len(data), sizes):
        exchange.feed(data[start : start + sizes], 0.0)
    exchange.lost(None)
    return bytes(body), (await exchange.ended).status


@pytest.mark.parametrize("sizes", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "head, body",
    [
        (b"Content-Length: 11", b"hello world"),
        (b"Transfer-Encoding: chunked", b"6;x=1\r\nhello \r\n5\r\nworld\r\n0\r\n\r\n"),
        (b"transfer-encoding: chunked", b"b\r\nhello world\r\n0\r\nTrailer: 1\r\n\r\n"),
        (b"Connection: close", b"hello world"),
    ],
)
def test_bodies_however_they_are_cut(head, body, sizes):
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + body
    assert asyncio.run(_exchange(data, sizes)) == (b"hello world", 200)


@pytest.mark.parametrize(
    "data, kind",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel", "cut off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", "cut off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "protocol"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "protocol"),
        (b"", "cut off"),
    ],
)
def test_broken_answers(data, kind):
    with pytest.raises(HttpError) as error:
        asyncio.run(_exchange(data, 4))
    assert error.value.kind == kind


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("sizes", [1, 5, 1000])
def test_events_however_they_are_cut(end, sizes):
    events = (
        ': comment\nevent: x\ndata: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
        'data: {"choices": [{"delta":\ndata:  {"content": "é"}}]}\n\ndata: {"choices": [{"text": "b"}]}\n\n'
        'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9, "prompt_tokens_details": '
        '{"cached_tokens": 2}}}\n\ndata: [DONE]\n\n'
    )
    outcome, data = Outcome(0.0, 2), events.replace("\n", end).encode()
    reader = AnswerReader(outcome)
    for start in range(0, len(data), sizes):
        reader.feed(data[start : start + sizes], float(start))
    reader.close(200)
    assert outcome.error is None and outcome.text == "éb" and len(outcome.pieces_at) == 2
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == (3, 9, 2)


@pytest.mark.parametrize(
    "events, kind, says",
    [
        ('data: {"error": {"message": "no"}}\n\n', "stream", "no"),
        ('data: {"object": "error", "message": "gone"}\n\n', "stream", "gone"),
        ('event: error\ndata: {"detail": "late"}\n\n', "stream", "late"),
        ('data: {"choices": [{"text": "a"}]}\n\n', "cut off", "without"),
        ("data: [DONE]\n\n", "empty", "no piece"),
        ('data: {"choices": [1, {"delta": 2}], "usage": 3}\n\ndata: [DONE]\n\n', "empty", "no piece"),
    ],
)
def test_errors_within_streams(events, kind, says):
    outcome = Outcome(0.0, 2)
    reader = AnswerReader(outcome)
    reader.feed(events.encode(), 0.0)
    reader.close(200)
    assert outcome.error == kind and says in outcome.message


def test_connections_are_used_again():
    server = KnownServer()
    (row,) = rows_of(server, rate=LoadConfig.rate, concurrency="2", num_requests=30)
    assert row["completed"] == 30 and server.connections == 2


# ---- settings and the command


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"rate": "0"}, "rate has '0'"),
        ({"rate": "a"}, "rate has 'a'"),
        ({"rate": ""}, "rate=''"),
        ({"rate": "auto"}, "give ttft_ms"),
        ({"rate": "trace"}, "rate=trace needs trace"),
        ({"rate": "2", "concurrency": "2"}, "give one"),
        ({"concurrency": "1.5"}, "concurrency has '1.5'"),
        ({"concurrency": "inf"}, "concurrency has 'inf'"),
        ({"url": "localhost:8000"}, "url=localhost:8000"),
        ({"url": ""}, "names no server"),
        ({"url": "http://a:b"}, "url=http://a:b"),
        ({"url": "http://:8000"}, "url=http://:8000"),
        ({"url": "http://a,http://a"}, "names of servers repeat"),
        ({"names": "a,b"}, "2 names for 1 servers"),
        ({"workload": "file"}, "workload=file goes with prompts"),
        ({"trace": "nowhere"}, "trace=nowhere is no file"),
        ({"compare": "nowhere"}, "compare=nowhere is neither"),
        ({"duration_s": 3.0, "num_requests": 3}, "give one"),
        ({"duration_s": 3.0, "rate": "inf"}, "give num_requests"),
        ({"extra_body": "[1]"}, "give a JSON object"),
        ({"slo_share": 0.0}, "slo_share=0.0"),
        ({"burstiness": 0.0}, "burstiness=0.0"),
        ({"workload": "conversation", "api": "completions"}, "use api=chat"),
    ],
)
def test_settings_that_cannot_be_meant(changes, says):
    from trainer.config.load import Api, Workload

    kinds = {"workload": Workload, "api": Api}
    with pytest.raises(UserError, match=says):
        LoadConfig(**{key: kinds[key](value) if key in kinds else value for key, value in changes.items()})


def test_requests_of_a_point():
    assert LoadConfig(duration_s=10.0).requests_at(4.0) == 40
    assert LoadConfig().requests_at(4.0) == 100 and LoadConfig(quick=True).requests_at(4.0) == 16


def bench(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / "bench_load.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_command_runs_servers_side_by_side(tmp_path):
    slow, fast = KnownServer(ttft_s=0.2), KnownServer(metrics="# TYPE vllm:x gauge\n")
    asked = [f"{key}={value}" for key, value in SMALL.items()]
    with slow.in_a_thread(), fast.in_a_thread():
        done = bench(
            *(f"url={slow.url},{fast.url}", "names=slow,fast", "price_per_hour=2", "ttft_ms=100"),
            *(*asked, "rate=40,80", "--quick", "--out", str(tmp_path)),
        )
        again = bench(f"url={fast.url}", "names=now", f"compare={tmp_path}/bench_load.json", *asked, "rate=40")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report) == {"name", "machine", "versions", "rows"}
    points = [row for row in report["rows"] if row["work"] == "load"]
    assert [(row["server"], row["rate"]) for row in points] == [("slow", 40), ("fast", 40), ("slow", 80), ("fast", 80)]
    assert [row["goodput"] for row in points[::2]] == [0, 0]
    ratios = [row["ratio"] for row in report["rows"] if row["work"] == "load_ttft_p50"]
    assert len(ratios) == 2 and all(row["ours_name"] == "slow" for row in report["rows"] if "ours" in row)
    assert "(e2e - TTFT) / (output tokens - 1)" in done.stdout and "a million output tokens cost" in done.stdout
    assert json.loads((tmp_path / "bench_load.json").read_text()) == report
    lines = list(csv.DictReader((tmp_path / "bench_load.csv").open()))
    assert [float(line["ttft_ms_p50"]) for line in lines] == [row["ttft_ms"]["p50"] for row in points]
    assert again.returncode == 0, again.stderr
    peers = [
        row["peer_name"] for row in json.loads(again.stdout.splitlines()[-1])["rows"] if row["work"] == "load_e2e_p50"
    ]
    assert peers == ["slow", "fast"]


def test_ratios_are_first_over_other():
    def row(server: str, ttft: float) -> dict:
        figures = {"ttft_ms": {"p50": ttft, "p99": ttft}, "tpot_ms": {}, "e2e_ms": {}, "output_tokens_per_s": 5.0}
        return {"work": "load", "server": server, "load": "1", "rate": 1.0, "completed": 1, **figures}

    found = compared_rows([row("a", 10.0), row("b", 20.0)], [])
    assert {(r["work"], r["ratio"]) for r in found} == {
        *(("load_ttft_p50", 0.5), ("load_ttft_p99", 0.5)),
        ("load_output_tokens_per_s", 1.0),
    }


def test_command_without_a_server_and_with_a_mistake(tmp_path):
    unreachable, wrong, help_ = bench("url=http://127.0.0.1:1"), bench("rat=1"), bench("--help")
    assert unreachable.returncode == 1 and "is a server running there?" in unreachable.stdout
    assert json.loads(unreachable.stdout.splitlines()[-1])["rows"][0]["errors"] == {"connect": 1}
    assert wrong.returncode == 2 and "did you mean" in wrong.stderr
    (tmp_path / "file").touch()
    folder = bench(f"out={tmp_path}/file")
    assert folder.returncode == 2 and "out=" in folder.stderr
    assert "Traceback" not in unreachable.stderr + wrong.stderr + folder.stderr
    assert help_.returncode == 0 and "burstiness" in help_.stdout
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UserError, match="no report of bench_load"):
        read_rows(str(tmp_path / "other.json"))
