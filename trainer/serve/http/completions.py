"""POST /v1/completions: text or token ids in, text out; with `echo` the prompt's log-probabilities too.

This is the endpoint of evaluation harnesses: they send batches of token ids with echo=true, logprobs=1, max_tokens=0 or
1, and read each prompt token's log-probability and whether it was the likeliest one. Choices come in the prompts'
order, n for each.
"""

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from trainer.serve.http.calls import Call, EventStream, finish_text, unfinished, usage
from trainer.serve.http.logprobs import CompletionLogprobs, prompt_logprobs
from trainer.serve.http.prompts import Prompt, encode_prompts, prompt_text, route_model
from trainer.serve.http.protocol import CompletionRequest
from trainer.serve.http.vocabulary import Vocabulary
from trainer.serve.interface import Engine
from trainer.serve.outputs import Choice, Delta, RequestOutput, TokenLogprob


async def complete(engine: Engine, vocabulary: Vocabulary, request: Request, body: CompletionRequest) -> Response:
    """Answer a call; everything that can be refused is, before the first byte.

    raises  UserError, ApiError, QueueFull, EngineDead
    """
    body.check()
    adapter, params = route_model(engine, body.model), body.to_params()
    prompts = await encode_prompts(
        engine, body.prompt, add_special_tokens=body.add_special_tokens, offsets=bool(body.echo)
    )
    if body.echo:
        for prompt in prompts:
            prompt.text = prompt_text(prompt, engine.tokenizer)
    call = Call(engine, "cmpl")
    await call.submit(
        [prompt.token_ids for prompt in prompts],
        params,
        adapter=adapter,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )
    writer = _Writer(call, vocabulary, body, prompts)
    if body.stream:
        return EventStream(writer.events(), call)
    return JSONResponse(writer.whole(await call.collect(request)))


class _Writer:
    """One call's JSON, whole or in pieces; both are made by the same functions."""

    def __init__(self, call: Call, vocabulary: Vocabulary, body: CompletionRequest, prompts: list[Prompt]) -> None:
        self._call, self._vocabulary, self._body, self._prompts = call, vocabulary, body, prompts
        self._n = body.n or 1
        self._skip_special = body.skip_special_tokens is not False
        self._head = {
            "id": call.call_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or call.engine.model_name,
        }
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = []
        for prompt_index, output in enumerate(outputs):
            choices += [self._choice(prompt_index, choice, output.prompt_logprobs) for choice in output.choices]
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self._prompts)
        completion_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.choices)
        cached = sum(output.num_cached_tokens for output in outputs)
        return {**self._head, "choices": choices, "usage": usage(prompt_tokens, completion_tokens, cached)}

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        completion_tokens, error = 0, None
        async for prompt_index, delta in self._call.deltas():
            completion_tokens += len(delta.token_ids)
            error = error or unfinished(delta.finish_reason, delta.stop_reason)
            piece = self._piece(prompt_index, delta, self._call.streams[prompt_index].prompt_logprobs)
            if piece["text"] or piece["logprobs"] or delta.finish_reason:
                yield self._chunk([piece])
        if error:
            raise error
        if self._body.include_usage:
            prompt_tokens = sum(len(prompt.token_ids) for prompt in self._prompts)
            cached = sum(stream.num_cached_tokens for stream in self._call.streams)
            yield self._chunk([], usage(prompt_tokens, completion_tokens, cached))

    def _chunk(self, choices: list[dict[str, Any]], used: dict[str, Any] | None = None) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        return chunk | {"usage": used} if self._body.include_usage else chunk

    def _choice(self, prompt_index: int, choice: Choice, of_prompt: list[TokenLogprob | None] | None) -> dict[str, Any]:
        whole = Delta(
            choice.index, choice.text, choice.token_ids, choice.logprobs, choice.finish_reason, choice.stop_reason
        )
        piece = self._piece(prompt_index, whole, of_prompt)
        if self._body.prompt_logprobs is not None:
            piece["prompt_logprobs"] = prompt_logprobs(self._vocabulary, of_prompt or [], self._body.prompt_logprobs)
        return piece

    def _piece(self, prompt_index: int, delta: Delta, of_prompt: list[TokenLogprob | None] | None) -> dict[str, Any]:
        """What is new in a choice; the first piece begins with the prompt if it is to be echoed."""
        index = prompt_index * self._n + delta.index
        text, logprobs = "", None
        if self._body.echo and index not in self._begun:
            text, logprobs = self._echo(self._prompts[prompt_index], index, of_prompt)
        self._begun.add(index)
        if self._body.logprobs is not None:
            new = self._writer(index).write(delta.token_ids, delta.logprobs or [])
            logprobs = {name: logprobs[name] + values for name, values in new.items()} if logprobs else new
        return {
            "index": index,
            "text": text + delta.text,
            "logprobs": logprobs,
            "finish_reason": finish_text(delta.finish_reason),
            "stop_reason": delta.stop_reason,
        }

    def _echo(
        self, prompt: Prompt, index: int, of_prompt: list[TokenLogprob | None] | None
    ) -> tuple[str, dict[str, list[Any]] | None]:
        if self._body.logprobs is None:
            return prompt.text, None
        echo = CompletionLogprobs(self._vocabulary, num_top=self._body.logprobs, skip_special_tokens=False)
        logprobs = echo.write(prompt.token_ids, of_prompt or [], prompt.offsets)
        too_far = echo.offset - len(prompt.text)
        if prompt.offsets is None and too_far > 0:  # sentencepiece drops the first token's space
            logprobs["text_offset"] = [max(0, offset - too_far) for offset in logprobs["text_offset"]]
        self._writer(index).offset = len(prompt.text)
        return prompt.text, logprobs

    def _writer(self, index: int) -> CompletionLogprobs:
        if index not in self._logprobs:
            self._logprobs[index] = CompletionLogprobs(
                self._vocabulary, num_top=self._body.logprobs, skip_special_tokens=self._skip_special
            )
        return self._logprobs[index]
