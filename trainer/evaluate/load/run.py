"""The whole of a load test: servers are asked what they take, and get their loads in turns."""

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable
from typing import Any

from trainer.config.errors import require
from trainer.config.load import Api, LoadConfig
from trainer.evaluate.load.client import Client
from trainer.evaluate.load.measures import point_figures
from trainer.evaluate.load.notes import notes
from trainer.evaluate.load.point import run_point
from trainer.evaluate.load.probe import Server, probe
from trainer.evaluate.load.sweep import Load, held, loads
from trainer.evaluate.load.texts import TextMaker, from_tokenizer
from trainer.evaluate.load.workload import Workloads

log = logging.getLogger(__name__)


def run_load(config: LoadConfig) -> list[dict[str, Any]]:
    """`load_servers` in an event loop of its own."""
    return asyncio.run(load_servers(config))


async def load_servers(config: LoadConfig) -> list[dict[str, Any]]:
    """Put every load on every server of `url` and `compare`; a row a point, in the order of the run.

    A server that does not answer has one row, with its error.
    raises  UserError for settings, files or a tokenizer that cannot be used
    """
    workloads = Workloads(config)
    chat = config.api == Api.chat or (config.api == Api.auto and workloads.has_messages)
    require(chat or not workloads.has_messages, "api=completions takes text, and a row has messages; use api=chat")
    maker, count = from_tokenizer(config.tokenizer, chat=chat) if config.tokenizer else (None, None)
    return await _LoadTest(config, workloads, chat, maker, count).run()


class _LoadTest:
    def __init__(
        self,
        config: LoadConfig,
        workloads: Workloads,
        chat: bool,
        maker: TextMaker | None,
        count: Callable[[str], int] | None,
    ) -> None:
        self._config, self._workloads, self._chat, self._maker, self._count = config, workloads, chat, maker, count
        self._rows: list[dict[str, Any]] = []
        self._salt = f"{time.time_ns():x}"
        """Of this run, for servers whose prefix cache may hold an earlier one."""

    async def run(self) -> list[dict[str, Any]]:
        servers = [await self._probe(*named) for named in zip(self._config.labels, self._urls, strict=True)]
        turns = [(server, loads(self._config)) for server in servers if server.error is None]
        answers: dict[int, bool | None] = {}
        while turns:
            left = []
            for server, search in turns:
                try:
                    load = search.send(answers.get(id(search)))
                except StopIteration:
                    continue
                answers[id(search)] = held(await self._point(server, load), self._config)
                left.append((server, search))
            turns = left
        for server in servers:
            server.client.close()
        return self._rows

    @property
    def _urls(self) -> list[str]:
        return self._config.urls + self._config.compared_urls

    async def _probe(self, label: str, url: str) -> Server:
        key = self._config.api_key or os.environ.get("LOWBIT_API_KEY") or os.environ.get("OPENAI_API_KEY")
        server = await probe(label, Client(url, api_key=key), self._config, chat=self._chat, maker=self._maker)
        for note in server.notes:
            log.info("%s: %s", label, note)
        if server.error is not None:
            log.error("%s: %s: %s", label, server.error, server.message)
            self._rows.append(_failed_row(server))
        return server

    async def _point(self, server: Server, load: Load) -> dict[str, Any]:
        emptied = await server.empty_cache() if self._config.reset_cache else False
        salt = "" if emptied or not self._config.reset_cache else f"{self._salt}-{len(self._rows)}"
        of_words = "" if server.salts_cache else salt
        rate, num = load.rate, None
        if load.places is not None:
            rate, num = math.inf, self._config.requests_at(None)
        jobs = self._workloads.jobs(rate, server.maker, chat=self._chat, salt=of_words, num=num)
        run = await run_point(server, jobs, self._config, salt=salt, places=load.places)
        row = _row_head(server, load) | point_figures(run, self._config, is_open=load.places is None, count=self._count)
        row["prefix_cache"] = "emptied" if emptied else "kept apart" if salt else "as it was"
        row["counted_by"] = "server" if server.usage_in_stream else "tokenizer" if self._count else "pieces"
        row["notes"] = notes(row, self._config)
        self._rows.append(row)
        log.info("%s, rate %s: %d of %d answered", server.label, load.name, row["completed"], row["requests"])
        return row


def _row_head(server: Server, load: Load) -> dict[str, Any]:
    rate = "trace" if load.rate is None else "inf" if math.isinf(load.rate) else load.rate
    head = {"work": "load", "server": server.label, "url": server.client.url, "model": server.model}
    head |= {"server_version": server.version, "load": load.name, "loop": "open" if load.places is None else "closed"}
    return head | {"rate": rate if load.places is None else None, "concurrency": load.places}


def _failed_row(server: Server) -> dict[str, Any]:
    head = {"work": "load", "server": server.label, "url": server.client.url, "model": server.model}
    failed = {"load": "none", "loop": None, "rate": None, "concurrency": None, "requests": 1, "completed": 0}
    says = {"errors": {server.error: 1}, "errors_say": {server.error: server.message}}
    return head | failed | says | {"notes": [f"{server.error}: {server.message}"]}
