"""serve: an engine behind HTTP, from the first connection to the last.

SIGTERM or SIGINT closes the port, gives running requests `drain_s` seconds, ends the rest with a reason that their
clients see, and returns; the process exits with 0. A second SIGINT ends them at once. An engine that has failed ends
the server too: whoever started it can start another, and none is left that only says no.
"""

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from trainer.config.errors import UserError
from trainer.serve.config import ServeConfig
from trainer.serve.http.api import create_app
from trainer.serve.http.guard import KEY_VARIABLE, wanted_key
from trainer.serve.interface import Engine

log = logging.getLogger(__name__)

__all__ = ["create_app", "serve"]

KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections (httpx 5 s, aiohttp 15 s), so that none sends into one just closed."""
FLUSH_S = 5.0
"""After the drain, seconds for clients to read what was written."""


def serve(engine: Engine, config: ServeConfig) -> int:
    """Serve until a signal comes or the engine fails; starts the engine and stops it.

    returns  the exit code: 0 after a signal, 1 if the engine has failed
    raises   UserError if the port is taken
    """
    return asyncio.run(_serve(engine, config))


async def _serve(engine: Engine, config: ServeConfig) -> int:
    with contextlib.closing(_bind(config.host, config.port)) as listener:
        await engine.start()
        _warn_if_open(config)
        server = Server(create_app(engine), engine, config.drain_s)
        await server.serve([listener])
        return int(server.engine_failed)


class Server(uvicorn.Server):
    """uvicorn, told to drain the engine while it waits for connections, and to return after a signal instead of
    raising it again."""

    def __init__(self, app: FastAPI, engine: Engine, drain_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(drain_s + FLUSH_S),
            )
        )
        self._engine, self._drain_s = engine, drain_s
        self.engine_failed = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in sockets or []:  # what is accepted inherits it; asyncio sets it only where proto is not 0
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            log.info("serve    http://%s:%d", f"[{host}]" if ":" in host else host, port)

    async def on_tick(self, counter: int) -> bool:
        self.engine_failed = not self._engine.is_healthy()
        if self.engine_failed:
            log.error("serve    the engine has failed; stopping")
        return await super().on_tick(counter) or self.engine_failed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("serve    stopping; running requests get %g s", self._drain_s)
        draining = asyncio.create_task(self._engine.stop(self._drain_s))
        await super().shutdown(sockets)
        if not self.force_exit:
            await draining
            return
        draining.cancel()
        await self._engine.stop(0)
        if answers := list(self.server_state.tasks):  # uvicorn has not waited for them
            await asyncio.wait(answers, timeout=FLUSH_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


def _bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, before anything slow is done.

    raises  UserError if that cannot be
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"host={host} is no address of this machine: {error}; try host=127.0.0.1") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UserError(
            f"port={port} on host={host} cannot be opened: {error.strerror}; use another port, or port=0 for a free one"
        ) from error
    return listener


def _warn_if_open(config: ServeConfig) -> None:
    """Whoever reaches the port can load adapters from this machine's disk."""
    if wanted_key(config.api_key) is None and not _is_loopback(config.host):
        log.warning(
            "host=%s is reachable from other machines and no API key is set; set api_key or %s",
            config.host,
            KEY_VARIABLE,
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
