"""AsyncEngine: the engine in a thread of its own, for asyncio.

The event loop hands over commands and gets events back, a batch a step; nothing else crosses. What can be refused is
refused in `submit`, on the loop, before anything is queued.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from trainer.config.errors import UserError, require
from trainer.serve.adapters import Adapter
from trainer.serve.build import Built
from trainer.serve.engine import Event, request_output
from trainer.serve.interface import EngineDead, QueueFull
from trainer.serve.live_state import LiveState
from trainer.serve.outputs import Choice, Delta, FinishReason, RequestOutput, TokenLogprob
from trainer.serve.sampling_params import SamplingParams
from trainer.serve.sequence import Request

log = logging.getLogger(__name__)

T = TypeVar("T")


class RequestStream:
    """One submitted request on the event loop: its deltas, in order, until every choice has ended."""

    def __init__(self, engine: "AsyncEngine", request: Request) -> None:
        self.request_id, self.num_prompt_tokens = request.request_id, len(request.prompt_token_ids)
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self._engine, self._request = engine, request
        self._deltas: asyncio.Queue[Delta | None] = asyncio.Queue()  # None: nothing more will come
        self._open = set(range(request.params.best_of))
        self._aborted = False
        self._failure: str | None = None

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> Delta:
        delta = await self._deltas.get()
        if delta is None:
            self._deltas.put_nowait(None)
            raise StopAsyncIteration
        return delta

    async def wait(self) -> RequestOutput:
        """The finished request; if the engine has failed, its answers say so and nothing else."""
        async for _ in self:
            pass
        if self._failure is None:
            return request_output(self._request)
        error = {"finish_reason": FinishReason.error, "stop_reason": self._failure}
        choices = [Choice(index, **error) for index in range(self._request.params.n)]
        return RequestOutput(self.request_id, self._request.prompt_token_ids, choices)

    def abort(self) -> None:
        """End the request and free its blocks; harmless when it has ended, and twice."""
        if self._open and not self._aborted:
            self._aborted = True
            self._engine.abort(self.request_id)

    def put(self, delta: Delta) -> bool:
        """Take a delta from the engine; True if it was the last one.

        The engine may be steps ahead of the loop: what has ended is counted in deltas, never read off the request.
        """
        self.num_cached_tokens = self._request.num_cached_tokens
        if self._request.params.prompt_logprobs is not None:
            self.prompt_logprobs = self._request.prompt_logprobs
        self._deltas.put_nowait(delta)
        if delta.finish_reason is not None:
            self._open.discard(delta.index)
        if not self._open:
            self._deltas.put_nowait(None)
        return not self._open

    def fail(self, reason: str) -> None:
        """End every open choice with an error."""
        self._failure = reason
        for index in list(self._open):
            self.put(Delta(index, "", [], finish_reason=FinishReason.error, stop_reason=reason))


class AsyncEngine:
    """See trainer/serve/interface.py for what each method promises."""

    def __init__(self, built: Built) -> None:
        self._built, self._engine, self._registry = built, built.engine, built.adapters
        self.config, self.tokenizer, self.metrics = self._engine.config, self._engine.tokenizer, self._engine.metrics
        self.max_model_len, self.vocab_size = self._engine.max_model_len, self._engine.vocab_size
        self.model_name, self.model_created = built.name, int(time.time())
        self.default_adapter = built.default_adapter
        self._streams: dict[str, RequestStream] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._num_submitted = self._num_added = 0  # the one is the loop's, the other the engine's
        self._asked: set[Future[Any]] = set()  # what waits for the engine's thread
        self._leaving: set[str] = set()  # adapters whose unloading is under way
        self._wake = threading.Condition()
        self._live = LiveState(self._engine)
        self._failure: BaseException | None = None
        self._closing = self._stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- on the event loop

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tell_adapters()
        self._thread.start()

    async def stop(self, drain_s: float) -> None:
        """Refuse new requests, give running ones `drain_s` seconds, end the rest with the reason, stop the thread."""
        self._closing = True
        deadline = time.monotonic() + drain_s
        while self._streams and self._failure is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for request_id in list(self._streams):
            self.abort(request_id, "the server is shutting down")
        while self._streams and self._failure is None:
            await asyncio.sleep(0.01)
        with self._wake:
            self._stopped = True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._refuse_asked()
        self._engine.grammars.close()

    async def prepare(self, params: SamplingParams) -> None:
        if params.json_schema is not None:
            await asyncio.to_thread(self._engine.grammars.compile, params.json_schema)

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        adapter: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        request_id: str | None = None,
    ) -> RequestStream:
        self._check_alive()
        waiting = self._num_submitted - self._num_added + len(self._engine.scheduler.waiting)
        if waiting >= self.config.max_queue:
            self.metrics.rejected()
            raise QueueFull(f"{waiting} requests wait already (max_queue={self.config.max_queue}); try again later")
        request = self._engine.request(
            prompt_token_ids,
            params,
            request_id=request_id,
            adapter=None if adapter is None else self._adapter(adapter),
            priority=priority,
            cache_salt=cache_salt,
        )
        require(request.request_id not in self._streams, f"request_id={request.request_id} is in use; give another one")
        stream = self._streams[request.request_id] = RequestStream(self, request)
        self._num_submitted += 1
        self._do(lambda: self._add(request))
        return stream

    def abort(self, request_id: str, reason: str = "aborted by the client") -> None:
        self._do(lambda: self._deliver(self._engine.abort(request_id, reason)))

    async def load_adapter(self, name: str, path: str) -> None:
        self._check_alive()
        factors = await asyncio.to_thread(self._registry.read, name, path)
        await self._between_steps(lambda: self._registry.install(name, path, factors))
        self._tell_adapters()

    async def unload_adapter(self, name: str) -> None:
        """Commands are run in order: a request that was submitted before this has the adapter to its end, and from now
        on none can name it, so none can meet an empty slot."""
        self._check_alive()
        loaded = self.adapters()
        require(name in loaded, f"lora_name={name} is not loaded; loaded are: {', '.join(loaded) or 'none'}")
        self._leaving.add(name)
        await self._between_steps(lambda: self._unload(name))
        self._tell_adapters()

    def adapters(self) -> dict[str, dict[str, Any]]:
        return {
            adapter.name: {"path": adapter.path, "rank": adapter.factors.rank, "sha256": adapter.sha256}
            for adapter in list(self._registry.by_name.values())
            if adapter.name not in self._leaving
        }

    async def state(self) -> dict[str, Any]:
        self._check_alive()
        snapshot = await self._between_steps(self._live.snapshot)
        return {"model": self.model_name, "adapters": list(self.adapters()), **snapshot}

    def is_healthy(self) -> bool:
        return self._failure is None and not self._closing

    def _adapter(self, name: str) -> Adapter:
        adapter = self._registry.by_name.get(name)
        if adapter is None or name in self._leaving:
            raise UserError(f"model={name} is no loaded adapter; loaded are: {', '.join(self.adapters()) or 'none'}")
        return adapter

    def _tell_adapters(self) -> None:
        self.metrics.adapters(list(self.adapters()), self.config.max_loras)

    def _check_alive(self) -> None:
        if self._failure is not None or self._closing:
            raise self._dead()

    def _dead(self) -> EngineDead:
        failed = self._failure is not None
        return EngineDead(f"the engine has failed: {self._failure}" if failed else "the server is shutting down")

    def _do(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    async def _between_steps(self, work: Callable[[], T]) -> T:
        """Run something in the engine's thread, between two steps, and wait for it; what it raises is raised here.

        Who stops waiting does not stop the work.

        raises  EngineDead if the engine ends first
        """
        if self._stopped or self._failure is not None:
            raise self._dead()
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()  # it cannot be cancelled any more

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:  # the caller's trouble, not that of every request
                done.set_exception(error)

        self._asked.add(done)
        self._do(run)
        try:
            return await asyncio.wrap_future(done)
        finally:
            self._asked.discard(done)

    def _refuse_asked(self) -> None:
        """Answer those who wait for a thread that has ended; later ones are not let in."""
        for done in self._asked:
            if not done.done():
                done.set_exception(self._dead())

    def _receive(self, events: list[Event]) -> None:
        for event in events:
            stream = self._streams.get(event.request.request_id)
            if stream is not None and stream.put(event.delta):
                del self._streams[event.request.request_id]

    # ---- in the engine's thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            log.exception("the engine has failed; the server can only be started again")
            self._failure = error
            self._loop.call_soon_threadsafe(self._fail_streams)

    def _turn(self) -> bool:
        """Run the commands, then a step if there is work, else sleep; False at the end."""
        with self._wake:
            while not (self._commands or self._engine.has_work or self._stopped):
                self._wake.wait()
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        if self._engine.has_work:
            self._deliver(self._engine.step())
        return not self._stopped

    def _add(self, request: Request) -> None:
        self._num_added += 1
        self._engine.add(request)

    def _unload(self, name: str) -> None:
        self._registry.unload(name)
        self._leaving.discard(name)

    def _deliver(self, events: list[Event]) -> None:
        if events:
            self._loop.call_soon_threadsafe(self._receive, events)

    def _fail_streams(self) -> None:
        for stream in self._streams.values():
            stream.fail(f"the engine has failed: {self._failure}")
        self._streams.clear()
        self._refuse_asked()
