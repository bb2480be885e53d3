"""KnownServer: a server whose delays are programmed, and that writes down what it really did.

It runs in the client's event loop, so both read one clock and are late together: what the client measured is compared
with the moments in `served`, not with what was wished for, and the comparison holds on a busy machine.
"""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Served:
    """A streamed answer. Moments are of time.perf_counter."""

    body: dict[str, Any]
    received: float
    number: int
    written: list[float] = field(default_factory=list)
    """When each piece with text was handed to the network."""
    ended: float = 0.0


@dataclass
class KnownServer:
    """ttft_s, gap_s      seconds before the first piece and between pieces
    places                answers at a time; the others wait
    tokens_per_piece      tokens that a piece carries
    accept_delay_s        seconds that a connection waits to be accepted
    stall                 (after, for): seconds after the first request from when, and how long, nothing is written
    fault                 what goes wrong in each third answer: error, cut, status, silent, garbage, empty
    cut_into              bytes of a chunk, so that events and characters are split; 0 for whole events
    refused               fields that are answered with 400
    """

    ttft_s: float = 0.0
    gap_s: float = 0.0
    places: int = 1 << 30
    tokens_per_piece: int = 1
    accept_delay_s: float = 0.0
    stall: tuple[float, float] | None = None
    fault: str | None = None
    cut_into: int = 0
    refused: tuple[str, ...] = ()
    tells_usage: bool = True
    metrics: str = ""
    resets: str | None = None
    blocks_loop_s: float = 0.0
    piece: str = "né "
    numbered: bool = False
    """Answers begin with their number in `served`."""

    served: list[Served] = field(default_factory=list)
    num_resets: int = 0
    connections: int = 0
    url: str = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of a connection, one after the other."""
        try:
            while await self._request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        lengths = [line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length")]
        body = json.loads(await reader.readexactly(int(lengths[0]))) if lengths else {}
        return await self._route(method, path, body, writer)

    async def _route(self, method: str, path: str, body: dict, writer: asyncio.StreamWriter) -> bool:
        match method, path:
            case "GET", "/v1/models":
                return _whole(writer, 200, {"data": [{"id": "known"}]})
            case "GET", "/metrics" if self.metrics:
                return _whole(writer, 200, self.metrics)
            case "POST", path if path == self.resets:
                self.num_resets += 1
                return _whole(writer, 200, {})
            case "POST", "/v1/completions" | "/v1/chat/completions":
                return await self._complete(path.startswith("/v1/chat"), body, writer)
        return _whole(writer, 404, {"detail": "Not Found"})

    async def _complete(self, chat: bool, body: dict, writer: asyncio.StreamWriter) -> bool:
        if body["model"] != "known":
            return _whole(writer, 404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
        if refused := [name for name in self.refused if name in body]:
            return _whole(writer, 400, {"error": {"message": f"{refused[0]} is no field"}})
        if not body["stream"]:
            return _whole(writer, 200, {"choices": [], "usage": {"prompt_tokens": _num_tokens(body)}})
        served = Served(body, time.perf_counter(), len(self.served))
        is_probe = body["max_tokens"] == 2
        if not is_probe:
            self.served.append(served)
        fault = self.fault if not is_probe and len(self.served) % 3 == 0 else None
        if fault == "status":
            return _whole(writer, 429, {"error": {"message": "the queue is full"}})
        if self.blocks_loop_s and not is_probe:
            time.sleep(self.blocks_loop_s)
        async with self._room:
            return await self._stream(chat, served, fault, writer)

    async def _stream(self, chat: bool, served: Served, fault: str | None, writer: asyncio.StreamWriter) -> bool:
        writer.write(HEAD)
        if chat:
            self._event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        num = served.body["max_tokens"] // self.tokens_per_piece
        for i in range(num if fault != "empty" else 0):
            await asyncio.sleep(self.gap_s if i else self.ttft_s)
            await self._stalled()
            if fault and i == num // 2:
                return await self._fail(fault, writer)
            piece = f"{served.number}{self.piece}" if self.numbered and i == 0 else self.piece
            text = {"delta": {"content": piece}} if chat else {"text": piece}
            served.written.append(time.perf_counter())
            self._event(writer, {"choices": [{"index": 0, "finish_reason": None} | text]})
            await writer.drain()
        end = {"choices": [{"index": 0, "finish_reason": "length", "delta": {}, "text": ""}]}
        if self.tells_usage and "stream_options" in served.body:
            end["usage"] = {"prompt_tokens": _num_tokens(served.body), "completion_tokens": served.body["max_tokens"]}
        self._event(writer, end)
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        served.ended = time.perf_counter()
        await writer.drain()
        return True

    async def _stalled(self) -> None:
        if self.stall is not None and self.served:
            after, seconds = self.stall
            began = self.served[0].received + after
            if began <= time.perf_counter() < began + seconds:
                await asyncio.sleep(began + seconds - time.perf_counter())

    async def _fail(self, fault: str, writer: asyncio.StreamWriter) -> bool:
        if fault == "error":
            self._event(writer, {"error": {"message": "the GPU fell off the bus", "code": 500}})
            writer.write(b"0\r\n\r\n")
        elif fault == "garbage":
            _chunk(writer, b"data: {not json\n\n")
            writer.write(b"0\r\n\r\n")
        elif fault == "silent":
            await asyncio.sleep(3600)
        return fault in ("error", "garbage")

    def _event(self, writer: asyncio.StreamWriter, event: dict) -> None:
        data = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
        for start in range(0, len(data), self.cut_into or len(data)):
            _chunk(writer, data[start : start + (self.cut_into or len(data))])

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["KnownServer"]:
        """Listen at a free port of this event loop."""
        self._room = asyncio.Semaphore(self.places)
        loop, tasks = asyncio.get_running_loop(), set()
        with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
            listener.setblocking(False)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or the kernel delays what is to be known
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

            def keep(coroutine: Any) -> None:
                tasks.add(task := asyncio.ensure_future(coroutine))
                task.add_done_callback(tasks.discard)

            async def accept() -> None:
                while True:
                    accepted, _ = await loop.sock_accept(listener)
                    self.connections += 1
                    await asyncio.sleep(self.accept_delay_s)
                    reader = asyncio.StreamReader()
                    protocol = asyncio.StreamReaderProtocol(
                        reader, lambda reader, writer: keep(self.answer(reader, writer))
                    )
                    await loop.connect_accepted_socket(lambda p=protocol: p, accepted)

            keep(accept())
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.contextmanager
    def in_a_thread(self) -> Iterator["KnownServer"]:
        """Run beside other processes, in a loop of its own."""
        begun, loop = threading.Event(), asyncio.new_event_loop()

        async def serve() -> None:
            self._end = asyncio.Event()
            async with self.running():
                begun.set()
                await self._end.wait()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
        thread.start()
        begun.wait()
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(self._end.set)
            thread.join()
            loop.close()


def _num_tokens(body: dict) -> int:
    """One token a word, and three of a template."""
    text = body.get("prompt") or " ".join(message["content"] for message in body["messages"])
    return 3 + len(text.split())


def _whole(writer: asyncio.StreamWriter, status: int, body: Any) -> bool:
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return True


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
