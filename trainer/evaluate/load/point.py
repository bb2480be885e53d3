"""One point: the jobs go out when they are due, and every answer is written down.

An open loop does not know the server: a job starts at its moment, however many are unanswered, and latencies count from
that moment. A client that waited for answers would send least when the server is slowest, and miss what users meet then
(coordinated omission). The closed loop is there for comparison and says what it is.

The client watches itself: a clock that ticks every 10 ms shows how late its event loop is, since that lateness is in
every moment that is written down.
"""

import asyncio
import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from trainer.config.load import LoadConfig
from trainer.evaluate.load.answer import AnswerReader, Outcome
from trainer.evaluate.load.energy import LOCAL, EnergyMeter
from trainer.evaluate.load.framing import HttpError
from trainer.evaluate.load.probe import Server
from trainer.evaluate.load.server_metrics import MetricsWatch
from trainer.evaluate.load.workload import Job, Messages

TICK_S = 0.01


@dataclass
class Run:
    """A finished point. Moments are of time.perf_counter.

    began    the moment that the jobs' `due_s` counts from
    lags_s   how late each tick of the client's clock was
    """

    outcomes: list[Outcome] = field(default_factory=list)
    began: float = 0.0
    lags_s: list[float] = field(default_factory=list)
    pages: list[tuple[float, bytes]] = field(default_factory=list)
    joules: dict[str, float] = field(default_factory=dict)


async def run_point(server: Server, jobs: list[Job], config: LoadConfig, *, salt: str, places: int | None) -> Run:
    """Put the jobs on the server and wait for every answer.

    places  None for an open loop; else so many jobs at a time, each due when there is room for it
    """
    run = Run()
    send = _Sender(server, config, run, salt)
    every_s = config.metrics_every_s if server.metrics else 0.0
    meter, watch = EnergyMeter(enabled=server.client.host in LOCAL), MetricsWatch(server.client, every_s=every_s)
    async with meter, watch:
        ticking = asyncio.create_task(_tick(run.lags_s))
        ahead = [job for job in jobs if job.warmup and job.due_s == 0]
        with _no_collection():
            await _closed_loop(send, ahead, 1)
            run.began = time.perf_counter()
            jobs = jobs[len(ahead) :]
            await (_open_loop(send, jobs, run.began) if places is None else _closed_loop(send, jobs, places))
        ticking.cancel()
    run.pages, run.joules = watch.pages, meter.joules
    return run


async def _open_loop(send: "_Sender", jobs: list[Job], began: float) -> None:
    tasks = []
    for job in jobs:
        due = began + job.due_s
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(send.job(job, due)))
    await asyncio.gather(*tasks)


async def _closed_loop(send: "_Sender", jobs: list[Job], places: int) -> None:
    waiting = iter(jobs)

    async def place() -> None:
        for job in waiting:
            await send.job(job, time.perf_counter())

    await asyncio.gather(*(place() for _ in range(places)))


class _Sender:
    """Sends jobs and writes their outcomes down."""

    def __init__(self, server: Server, config: LoadConfig, run: Run, salt: str) -> None:
        self._server, self._config, self._run = server, config, run
        self._extra = {"cache_salt": salt} if salt and server.salts_cache else {}

    async def job(self, job: Job, due: float) -> None:
        """A request, or the turns of a conversation up to the first that fails; each is due after its thinking."""
        history: Messages = []
        for number, turn in enumerate(job.turns):
            outcome = Outcome(due, turn.output_len, job.warmup, number)
            prompt = history + turn.prompt if isinstance(turn.prompt, list) else turn.prompt
            await self._request(prompt, outcome)
            if outcome.error is not None or number + 1 == len(job.turns):
                return
            history = [*prompt, {"role": "assistant", "content": outcome.text}]
            due = outcome.ended + job.turns[number + 1].think_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    async def _request(self, prompt: str | Messages, outcome: Outcome) -> None:
        server, reader = self._server, AnswerReader(outcome)
        body = json.dumps(server.body(self._config, prompt, outcome.asked_tokens) | self._extra).encode()
        self._run.outcomes.append(outcome)
        outcome.sent = time.perf_counter()
        status = 0
        try:
            async with asyncio.timeout(self._config.timeout_s):
                response = await server.client.stream(
                    "POST",
                    server.path,
                    body,
                    reader.feed,
                    lambda head: reader.head(head.status, head.headers.get("content-type", "")),
                )
            status = response.status
        except HttpError as error:
            outcome.fail(error.kind, str(error))
        except TimeoutError:
            outcome.fail("timeout", f"no whole answer within timeout_s={self._config.timeout_s:g}")
        if outcome.error is not None or not outcome.ended:
            outcome.ended = time.perf_counter()
        if outcome.error is None:
            reader.close(status)


async def _tick(lags_s: list[float]) -> None:
    """Write down how late a sleep of TICK_S ends."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(TICK_S)
        lags_s.append(time.perf_counter() - before - TICK_S)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A full garbage collection stops the client for milliseconds; what a point keeps is no garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
