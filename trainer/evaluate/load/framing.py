"""HTTP/1.1's answers, byte by byte: the head, then a body by length, in chunks, or up to the end of the connection."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

OnBody = Callable[[bytes, float], None]
OnHead = Callable[["Response"], None]
MAX_HEAD_BYTES = 65536


class HttpError(Exception):
    """The exchange failed: `kind` is connect, cut off or protocol."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Response:
    """Status and headers (lower case); `body` where it was asked for whole."""

    status: int
    headers: dict[str, str]
    body: bytearray = field(default_factory=bytearray)


class Exchange:
    """One answer on a connection: bytes in, head and body pieces out; `ended` is done with the last byte."""

    def __init__(self, on_body: OnBody, on_head: OnHead | None = None) -> None:
        self.ended: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self.response: Response | None = None
        self.touched = False
        self._on_body, self._on_head, self._buffer = on_body, on_head, bytearray()
        self._left: int | None = 0
        """Bytes until the end of the chunk or body; None: the body ends with the connection."""
        self._chunked = False

    @property
    def keeps_connection(self) -> bool:
        """Whether another request may follow."""
        headers = self.response.headers if self.response else {}
        return headers.get("connection", "").lower() != "close" and self._left is not None and not self._buffer

    def feed(self, data: bytes, now: float) -> None:
        """What arrived at `now`."""
        self.touched = True
        self._buffer += data
        try:
            while self._buffer and not self.ended.done() and self._take(now):
                pass
        except ValueError as error:
            self._fail("protocol", f"the answer is no HTTP/1.1: {error}")

    def lost(self, error: Exception | None) -> None:
        """The connection is gone."""
        if self.ended.done():
            return
        if self.response is not None and self._left is None:
            self.ended.set_result(self.response)
            return
        self._fail("cut off", f"the connection ended within the answer{f': {error}' if error else ''}")

    def _fail(self, kind: str, message: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(HttpError(kind, message))

    def _take(self, now: float) -> bool:
        """Take one piece out of the buffer; False when more bytes are needed."""
        if self.response is None:
            return self._take_head()
        if self._chunked and self._left == 0:
            return self._take_chunk_size()
        return self._take_body(now)

    def _take_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise ValueError(f"{MAX_HEAD_BYTES} bytes and no end of its head")
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(f"it begins with {first[:40]!r}")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        status = int(rest[:3])
        if status < 200:  # 100 Continue and the like
            return True
        self.response = Response(status, headers)
        if self._on_head is not None:
            self._on_head(self.response)
        self._start_body(headers)
        return True

    def _start_body(self, headers: dict[str, str]) -> None:
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        if self._chunked:
            return
        length = headers.get("content-length")
        self._left = None if length is None and self.response.status != 204 else int(length or 0)
        if self._left == 0:
            self.ended.set_result(self.response)

    def _take_chunk_size(self) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return False
        size = int(bytes(self._buffer[:end]).partition(b";")[0], 16)
        if size == 0:
            return self._take_trailer(end + 2)
        del self._buffer[: end + 2]
        self._left = size + 2  # the line end behind it
        return True

    def _take_trailer(self, start: int) -> bool:
        """Lines behind the last chunk, up to an empty one."""
        end = start if self._buffer[start : start + 2] == b"\r\n" else self._buffer.find(b"\r\n\r\n", start) + 2
        if end < start or len(self._buffer) < end + 2:
            return False
        del self._buffer[: end + 2]
        self.ended.set_result(self.response)
        return True

    def _take_body(self, now: float) -> bool:
        if self._left is None:
            piece, self._buffer = bytes(self._buffer), bytearray()
            self._on_body(piece, now)
            return True
        piece = bytes(self._buffer[: self._left])
        del self._buffer[: self._left]
        before, self._left = self._left, self._left - len(piece)
        data = piece[: max(0, before - 2)] if self._chunked else piece
        if data:
            self._on_body(data, now)
        if self._left == 0 and not self._chunked:
            self.ended.set_result(self.response)
        return True
