"""A client for load: every piece of a body with the moment at which it arrived.

A client that spends a millisecond a chunk measures itself, so this one is asyncio's transport with the framing and no
more: no redirects, cookies, proxies or compression. The clock is read first thing in `data_received`. Connections are
kept and used again, as real clients do; a kept one that the server closed meanwhile is replaced once, before any byte
of the answer.
"""

import asyncio
import ssl
import time
from urllib.parse import urlsplit

from trainer.evaluate.load.framing import Exchange, HttpError, OnBody, OnHead, Response

CONNECT_TIMEOUT_S = 20.0


class Connection(asyncio.Protocol):
    """A connection that carries one exchange at a time."""

    def __init__(self) -> None:
        self.closed = False
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._exchange is None or self._exchange.ended.done():
            self.close()
        else:
            self._exchange.feed(data, now)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._exchange is not None:
            self._exchange.lost(error)

    def send(self, request: bytes, exchange: Exchange) -> None:
        """Write the request; its answer goes to `exchange`."""
        self._exchange = exchange
        self._transport.write(request)

    def close(self) -> None:
        """Close it at once; bytes on their way are dropped."""
        self.closed = True
        self._transport.abort()


class Client:
    """Requests to one server.

    url  http(s)://host[:port][/path]; a /v1 at its end is dropped, for paths here begin with it
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(url.removesuffix("/v1"))
        self.url, self.host, self._path = url, parts.hostname or "", parts.path.rstrip("/")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._headers = f"Host: {parts.netloc.rpartition('@')[2]}\r\nAccept: */*\r\nUser-Agent: lowbit-load\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"
        self._idle: list[Connection] = []

    async def fetch(self, method: str, path: str, body: bytes | None = None, *, timeout_s: float = 60.0) -> Response:
        """The whole answer.

        raises  HttpError; TimeoutError
        """
        pieces = bytearray()
        async with asyncio.timeout(timeout_s):
            response = await self.stream(method, path, body, lambda data, now: pieces.extend(data))
        response.body = pieces
        return response

    async def stream(
        self,
        method: str,
        path: str,
        body: bytes | None,
        on_body: OnBody,
        on_head: OnHead | None = None,
    ) -> Response:
        """Send, and hand each piece of the body to `on_body(data, arrived)`; returns after the last one.

        raises  HttpError
        """
        request = self._request(method, path, body)
        while self._idle:
            connection = self._idle.pop()
            if connection.closed:
                continue
            exchange = Exchange(on_body, on_head)
            try:
                return await self._run(connection, request, exchange)
            except HttpError:
                if exchange.touched:
                    raise
        return await self._run(await self._connect(), request, Exchange(on_body, on_head))

    def close(self) -> None:
        """Close the kept connections."""
        while self._idle:
            self._idle.pop().close()

    def _request(self, method: str, path: str, body: bytes | None) -> bytes:
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode("latin-1") + b"\r\n" + (body or b"")

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(Connection, self.host, self._port, ssl=self._ssl)
        except TimeoutError:
            raise HttpError("connect", f"no connection within {CONNECT_TIMEOUT_S:g} s") from None
        except (OSError, UnicodeError) as error:  # UnicodeError: a host name that cannot be one
            raise HttpError("connect", str(error)) from error
        return connection

    async def _run(self, connection: Connection, request: bytes, exchange: Exchange) -> Response:
        kept = False
        try:
            connection.send(request, exchange)
            response = await exchange.ended
            kept = exchange.keeps_connection
            return response
        finally:
            if kept and not connection.closed:
                self._idle.append(connection)
            else:
                connection.close()
