"""One HTTP call and its engine requests: submitted together, collected or streamed, aborted together.

Whatever happens - a prompt that is refused half-way, a client that goes away, a cancelled task - every request of the
call is aborted on the way out; for those that have finished that is nothing.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from trainer.config.errors import UserError
from trainer.serve.http.errors import ApiError, api_error
from trainer.serve.interface import Engine, EngineDead, QueueFull, RequestStream
from trainer.serve.outputs import Delta, FinishReason, RequestOutput
from trainer.serve.sampling_params import SamplingParams

CLIENT_CLOSED = 499
"""nginx's status for a client that went away; nobody reads it."""


class Call:
    """The engine requests of one HTTP call, in the order of its prompts."""

    def __init__(self, engine: Engine, kind: str) -> None:
        self.engine = engine
        self.call_id = f"{kind}-{uuid.uuid4().hex}"
        self.streams: list[RequestStream] = []

    async def submit(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams] | SamplingParams,
        *,
        adapter: str | None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Submit every prompt, or none.

        raises  UserError, with the prompt's number if there are several; QueueFull; EngineDead
        """
        limit = self.engine.config.max_queue
        if len(prompts) > limit:
            raise UserError(
                f"prompt: the call has {len(prompts)} requests, max_queue={limit} may wait; send fewer a call, or "
                "start the server with a larger max_queue"
            )
        for prepared in [params] if isinstance(params, SamplingParams) else params:
            if prepared.json_schema is not None:
                await self.engine.prepare(prepared)
        settings = {"adapter": adapter, "priority": priority, "cache_salt": cache_salt}
        try:
            for index, token_ids in enumerate(prompts):
                # The engine fills in what is open, such as the longest answer, so each request has its own copy.
                wanted = replace(params) if isinstance(params, SamplingParams) else params[index]
                request_id = f"{self.call_id}-{index}"
                self.streams.append(self.engine.submit(token_ids, wanted, request_id=request_id, **settings))
                await asyncio.sleep(0)  # other clients' streams go on while thousands of prompts are checked
        except UserError as error:
            self.abort()
            which = f" (request {len(self.streams)} of the call)" if len(prompts) > 1 else ""
            raise UserError(f"{error}{which}") from error
        except (QueueFull, EngineDead, asyncio.CancelledError):
            self.abort()
            raise

    def abort(self) -> None:
        """End what still runs."""
        for stream in self.streams:
            stream.abort()

    async def collect(self, request: Request) -> list[RequestOutput]:
        """Wait for every answer.

        raises  ApiError if an answer did not come to its end: 503 aborted, 500 failed, 499 the client went away
        """
        waiting = asyncio.ensure_future(_wait_for_all(self.streams))
        try:
            await _first(waiting, _disconnected(request.receive))
            if not waiting.done():
                raise ApiError(CLIENT_CLOSED, "the client closed the connection")
            outputs = waiting.result()
        finally:
            waiting.cancel()
            self.abort()
        for output in outputs:
            for choice in output.choices:
                if error := unfinished(choice.finish_reason, choice.stop_reason):
                    raise error
        return outputs

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """(number of the prompt, delta) as they come."""
        if len(self.streams) == 1:
            async for delta in self.streams[0]:
                yield 0, delta
            return
        queue: asyncio.Queue[tuple[int, Delta | None]] = asyncio.Queue()
        tasks = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(self.streams)]
        try:
            for _ in tasks:
                while (item := await queue.get())[1] is not None:
                    yield item
                await tasks[item[0]]  # raises what ended it, if it did not end well
        finally:
            for task in tasks:
                task.cancel()


def unfinished(reason: FinishReason | None, text: str | int | None) -> ApiError | None:
    """The error for an answer that did not come to its own end, None for one that did."""
    match reason:
        case FinishReason.abort:
            return ApiError(503, f"the answer was aborted: {text}", code="aborted")
        case FinishReason.error:
            return ApiError(500, f"the answer failed: {text}", code="generation_failed")
    return None


def finish_text(reason: FinishReason | None) -> str | None:
    """The reason for JSON."""
    return None if reason is None else reason.value


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's usage. A prompt counts once, however many answers it has; an echoed prompt is no completion."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class EventStream(Response):
    """Server-sent events: a JSON object each, then [DONE], or an error and no [DONE].

    events  validated and submitted before the 200 is sent; it runs until its end or until the client is gone
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict[str, Any]], call: Call) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._call = events, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        try:
            await _first(writing, _disconnected(receive))
            if writing.done():
                writing.result()
        finally:
            writing.cancel()
            self._call.abort()

    async def _write(self, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = "[DONE]"
        try:
            async for event in self._events:
                await send(_event(json.dumps(event, separators=(",", ":"), allow_nan=False)))
                await asyncio.sleep(0)  # or a backlog is written without a look at whether the client is still there
        except (ApiError, UserError, EngineDead) as error:
            last = json.dumps(api_error(error).body)
        await send(_event(last))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(data: str) -> dict[str, Any]:
    return {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}


async def _first(wanted: asyncio.Future[Any], other: Awaitable[None]) -> None:
    """Wait until `wanted` is done or `other` is; `other` is cancelled."""
    watching = asyncio.ensure_future(other)
    try:
        await asyncio.wait((wanted, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()


async def _disconnected(receive: Receive) -> None:
    """Return when the client is gone. The body has been read, so nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _wait_for_all(streams: list[RequestStream]) -> list[RequestOutput]:
    return await asyncio.gather(*(stream.wait() for stream in streams))


async def _pump(index: int, stream: RequestStream, queue: asyncio.Queue[tuple[int, Delta | None]]) -> None:
    try:
        async for delta in stream:
            queue.put_nowait((index, delta))
    finally:
        queue.put_nowait((index, None))
