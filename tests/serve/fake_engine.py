"""FakeEngine: the engine as the server sees it, with a script where the model would be.

Log-probabilities come from a generator seeded by the last tokens and the adapter, so they form real distributions, are
the same whenever they are asked for, and cost microseconds. What the engine promises is kept: token ids of an answer
include the token that ended it, text never ends inside a character, a stop string is never shown in part.
"""

import asyncio
import codecs
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.config.errors import require
from trainer.serve.config import ServeConfig
from trainer.serve.http.server import Server, create_app
from trainer.serve.http.vocabulary import Vocabulary
from trainer.serve.interface import EngineDead, QueueFull
from trainer.serve.metrics import Metrics
from trainer.serve.outputs import Choice, Delta, FinishReason, RequestOutput, TokenLogprob
from trainer.serve.sampling_params import SamplingParams

CACHED_TOKENS = 2


class FakeEngine:
    """answer   what every request is answered with; random tokens follow if it ends before `max_tokens` and EOS is
                ignored
    step_s   seconds between tokens
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: ServeConfig | None = None,
        *,
        answer: str = "Grüße, 👩‍👩‍👧!\nfin",
        step_s: float = 0.0,
        max_model_len: int = 512,
    ) -> None:
        self.tokenizer, self.config = tokenizer, config or ServeConfig(model="tiny")
        self.answer, self.step_s, self.max_model_len = answer, step_s, max_model_len
        self.vocab_size = len(tokenizer) + 4  # padded, as models are
        self.metrics = Metrics("fake")
        self.model_name, self.model_created, self.default_adapter = "fake", int(time.time()), None
        self.vocabulary = Vocabulary(tokenizer)
        self.loaded: dict[str, str] = {}
        self.submitted: list[FakeStream] = []
        self.stopped = self.failed = False

    @property
    def active(self) -> list["FakeStream"]:
        return [stream for stream in self.submitted if not stream.ended]

    @property
    def aborted(self) -> list["FakeStream"]:
        return [stream for stream in self.submitted if stream.abort_reason is not None]

    async def start(self) -> None:
        self.stopped = False

    async def stop(self, drain_s: float) -> None:
        self.stopped = True
        end = time.monotonic() + drain_s
        while self.active and time.monotonic() < end:
            await asyncio.sleep(0.01)
        for stream in self.active:
            stream.abort("the server is shutting down")

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        adapter: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        request_id: str | None = None,
    ) -> "FakeStream":
        if self.stopped or self.failed:
            raise EngineDead("the server is shutting down" if self.stopped else "the engine has failed")
        require(bool(prompt_token_ids), "prompt is empty; give at least one token")
        params.check_vocabulary(self.vocab_size)
        room = self.max_model_len - len(prompt_token_ids)
        require(
            room >= (params.max_tokens != 0),
            f"prompt has {len(prompt_token_ids)} tokens, the model takes {self.max_model_len} (max_model_len)",
        )
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if len(self.active) >= self.config.max_queue:
            self.metrics.rejected()
            raise QueueFull(f"{len(self.active)} requests wait already", retry_after_s=2.4)
        self.submitted.append(FakeStream(self, request_id, prompt_token_ids, params, adapter))
        return self.submitted[-1]

    async def load_adapter(self, name: str, path: str) -> None:
        require("adapter" in path, f"lora_path={path} is no PEFT adapter; give a folder with adapter_config.json")
        self.loaded[name] = path

    async def unload_adapter(self, name: str) -> None:
        require(name in self.loaded, f"lora_name={name} is not loaded")
        del self.loaded[name]

    def adapters(self) -> dict[str, dict[str, Any]]:
        return {name: {"path": path, "rank": 8, "sha256": "0" * 64} for name, path in self.loaded.items()}

    async def prepare(self, params: SamplingParams) -> None:
        pass

    async def state(self) -> dict[str, Any]:
        return {"model": self.model_name, "running": [stream.request_id for stream in self.active]}

    def is_healthy(self) -> bool:
        return not (self.stopped or self.failed)

    def fail(self) -> None:
        """The engine's thread dies: what runs ends with an error."""
        self.failed = True

    def logprobs(self, context: list[int], adapter: str | None) -> np.ndarray:
        """[vocab_size] float32: the distribution after a context."""
        seed = [*context[-3:], len(context), len(adapter or "")]
        logits = np.random.default_rng(seed).normal(0, 2, self.vocab_size)
        return (logits - np.log(np.exp(logits).sum())).astype(np.float32)

    def entry(self, context: list[int], token_id: int, num_top: int, adapter: str | None) -> TokenLogprob:
        values = self.logprobs(context, adapter)
        best = np.argsort(-values, kind="stable")[:num_top].tolist()
        if token_id not in best:
            best.append(token_id)
        rank = 1 + int((values > values[token_id]).sum())
        return TokenLogprob(token_id, float(values[token_id]), rank, [(id_, float(values[id_])) for id_ in best])


class FakeStream:
    """One request; its answers are known at once and told token by token."""

    def __init__(
        self,
        engine: FakeEngine,
        request_id: str | None,
        prompt: list[int],
        params: SamplingParams,
        adapter: str | None,
    ) -> None:
        self.engine, self.prompt, self.params, self.adapter = engine, prompt, params, adapter
        self.request_id = request_id or f"fake-{len(engine.submitted)}"
        self.num_prompt_tokens, self.num_cached_tokens = len(prompt), 0
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.ended, self.abort_reason, self._begun = False, None, False
        self._choices = [self._answer(index) for index in range(params.n)]

    def abort(self, reason: str = "aborted by the client") -> None:
        if not self.ended and self.abort_reason is None:
            self.abort_reason = reason
            self.ended = not self._begun

    async def wait(self) -> RequestOutput:
        choices = [Choice(index) for index in range(self.params.n)]
        async for delta in self:
            choice = choices[delta.index]
            choice.text += delta.text
            choice.token_ids += delta.token_ids
            if delta.logprobs is not None:
                choice.logprobs = (choice.logprobs or []) + delta.logprobs
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        return RequestOutput(self.request_id, self.prompt, choices, self.prompt_logprobs, self.num_cached_tokens)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        self._begun = True
        try:
            for step in range(max(map(len, self._choices))):
                await asyncio.sleep(self.engine.step_s)
                self._prefill()
                for index, deltas in enumerate(self._choices):
                    if interruption := self._interruption(index):
                        if step < len(deltas):
                            yield interruption
                    elif step < len(deltas):
                        yield deltas[step]
                if self.abort_reason is not None or self.engine.failed:
                    return
        finally:
            self.ended = True

    def _interruption(self, index: int) -> Delta | None:
        if self.engine.failed:
            return Delta(index, "", [], finish_reason=FinishReason.error, stop_reason="the engine has failed")
        if self.abort_reason is not None:
            return Delta(index, "", [], finish_reason=FinishReason.abort, stop_reason=self.abort_reason)
        return None

    def _prefill(self) -> None:
        self.num_cached_tokens = min(CACHED_TOKENS, len(self.prompt))
        wanted, start = self.params.prompt_logprobs, self.params.prompt_logprobs_start
        if wanted is not None and self.prompt_logprobs is None:
            entry = self.engine.entry
            self.prompt_logprobs = [
                entry(self.prompt[:at], self.prompt[at], wanted, self.adapter) if at else None
                for at in range(start, len(self.prompt))
            ]

    def _answer(self, index: int) -> list[Delta]:
        """Every delta of a choice, made from the whole answer."""
        params, engine = self.params, self.engine
        text = engine.answer if index == 0 else f"{index}: {engine.answer}"
        ids = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += [] if params.ignore_eos else [engine.tokenizer.eos_token_id]
        if params.ignore_eos:
            ids = (ids * (params.max_tokens // len(ids) + 1))[: params.max_tokens]
        if params.max_tokens == 0:
            return [Delta(index, "", [], [] if params.logprobs is not None else None, FinishReason.length)]
        ids, reason = ids[: params.max_tokens], FinishReason.stop
        if ids[-1] != engine.tokenizer.eos_token_id:
            reason = FinishReason.length
        texts, stop = self._texts(ids)
        if stop is not None:
            reason, ids = FinishReason.stop, ids[: len(texts)]
        logprobs = [None] * len(ids)
        if params.logprobs is not None:
            context = [*self.prompt, *ids]
            ends = range(len(self.prompt), len(context))
            logprobs = [[engine.entry(context[:at], context[at], params.logprobs, self.adapter)] for at in ends]
        deltas = [Delta(index, *parts) for parts in zip(texts, ([id_] for id_ in ids), logprobs, strict=True)]
        deltas[-1].finish_reason, deltas[-1].stop_reason = reason, stop
        return deltas

    def _texts(self, ids: list[int]) -> tuple[list[str], str | None]:
        """New text of each token, and the stop string that ended it."""
        decoder, whole, ends = codecs.getincrementaldecoder("utf-8")("replace"), "", []
        for id_ in ids:
            if not (self.params.skip_special_tokens and self.engine.vocabulary.is_special(id_)):
                whole += decoder.decode(self.engine.vocabulary.bytes_of(id_))
            ends.append(len(whole))
        ends[-1] = len(whole := whole + decoder.decode(b"", final=True))
        found = [(whole.find(stop) + len(stop), stop) for stop in self.params.stop if stop in whole]
        if not found:
            return [whole[begin:end] for begin, end in zip([0, *ends], ends, strict=False)], None
        end, stop = min(found)
        shown = end if self.params.include_stop_str_in_output else end - len(stop)
        ends = [min(at, shown) for at in ends[: next(i for i, at in enumerate(ends) if at >= end) + 1]]
        return [whole[begin:end] for begin, end in zip([0, *ends], ends, strict=False)], stop


@contextlib.contextmanager
def serving(engine: FakeEngine, drain_s: float = 5.0) -> Iterator[str]:
    """The engine behind a real port, in a thread; gives the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(create_app(engine), engine, drain_s)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
