"""POST /v1/chat/completions: messages in, the assistant's message out, with tool calls where the model writes them."""

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from trainer.serve.http.calls import Call, EventStream, finish_text, unfinished, usage
from trainer.serve.http.chat import num_chars, render_chat
from trainer.serve.http.logprobs import chat_logprobs, prompt_logprobs
from trainer.serve.http.prompts import beside_the_loop, route_model
from trainer.serve.http.protocol import ChatRequest
from trainer.serve.http.tools import BEGIN, ToolCallParser, writes_tool_calls
from trainer.serve.http.vocabulary import Vocabulary
from trainer.serve.interface import Engine
from trainer.serve.outputs import Choice, Delta, FinishReason, RequestOutput


async def chat(engine: Engine, vocabulary: Vocabulary, request: Request, body: ChatRequest) -> Response:
    """Answer a call; everything that can be refused is, before the first byte.

    raises  UserError, ApiError, QueueFull, EngineDead
    """
    body.check()
    adapter, params = route_model(engine, body.model), body.to_params()
    use_tools = bool(body.tools) and body.tool_choice != "none"
    token_ids = await beside_the_loop(num_chars(body), render_chat, engine.tokenizer, body, use_tools=use_tools)
    parse_tools = use_tools and writes_tool_calls(engine.tokenizer)
    if parse_tools and BEGIN in engine.tokenizer.all_special_tokens:
        params.skip_special_tokens = False  # or the tags would not be in the text
    call = Call(engine, "chatcmpl")
    await call.submit([token_ids], params, adapter=adapter, priority=body.priority, cache_salt=body.cache_salt)
    writer = _Writer(call, vocabulary, body, parse_tools=parse_tools)
    if body.stream:
        return EventStream(writer.events(), call)
    [output] = await call.collect(request)
    return JSONResponse(writer.whole(output))


class _Answer:
    """One choice as it grows: its text, or content and tool calls where those are parsed."""

    def __init__(self, *, parse_tools: bool) -> None:
        self._parser = ToolCallParser() if parse_tools else None

    def grow(self, delta: Delta) -> tuple[str, list[dict[str, Any]], str | None]:
        """New content, new tool calls, and the finish reason for JSON."""
        reason = finish_text(delta.finish_reason)
        if self._parser is None:
            return delta.text, [], reason
        content, calls = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            rest, last = self._parser.finish()
            content, calls = content + rest, calls + last
        if delta.finish_reason is FinishReason.stop and self._parser.num_calls:
            reason = "tool_calls"  # `length` stays: the next call may be cut off
        return content, calls, reason


class _Writer:
    """One call's JSON, whole or in pieces."""

    def __init__(self, call: Call, vocabulary: Vocabulary, body: ChatRequest, *, parse_tools: bool) -> None:
        self._call, self._vocabulary, self._body, self._parse_tools = call, vocabulary, body, parse_tools
        self._head = {
            "id": call.call_id,
            "created": int(time.time()),
            "model": body.model or call.engine.model_name,
        }

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        completion_tokens = sum(len(choice.token_ids) for choice in output.choices)
        result = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(choice) for choice in output.choices],
            "usage": usage(len(output.prompt_token_ids), completion_tokens, output.num_cached_tokens),
        }
        if self._body.prompt_logprobs is not None:
            entries = output.prompt_logprobs or []
            result["prompt_logprobs"] = prompt_logprobs(self._vocabulary, entries, self._body.prompt_logprobs)
        return result

    def _choice(self, choice: Choice) -> dict[str, Any]:
        whole = Delta(choice.index, choice.text, choice.token_ids, finish_reason=choice.finish_reason)
        content, calls, reason = _Answer(parse_tools=self._parse_tools).grow(whole)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": reason,
            "stop_reason": choice.stop_reason,
        }

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        answers: dict[int, _Answer] = {}
        completion_tokens, error = 0, None
        async for _, delta in self._call.deltas():
            completion_tokens += len(delta.token_ids)
            error = error or unfinished(delta.finish_reason, delta.stop_reason)
            if delta.index not in answers:
                answers[delta.index] = _Answer(parse_tools=self._parse_tools)
                yield self._chunk([self._piece(delta.index, {"role": "assistant", "content": ""})])
            content, calls, reason = answers[delta.index].grow(delta)
            new = ({"content": content} if content else {}) | ({"tool_calls": calls} if calls else {})
            logprobs = self._logprobs(delta.logprobs)
            if new or logprobs or reason:
                piece = self._piece(delta.index, new, logprobs, reason)
                yield self._chunk([piece | {"stop_reason": delta.stop_reason} if reason else piece])
        if error:
            raise error
        if self._body.include_usage:
            [stream] = self._call.streams
            yield self._chunk([], usage(stream.num_prompt_tokens, completion_tokens, stream.num_cached_tokens))

    def _chunk(self, choices: list[dict[str, Any]], used: dict[str, Any] | None = None) -> dict[str, Any]:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        return chunk | {"usage": used} if self._body.include_usage else chunk

    def _logprobs(self, entries: list[Any] | None) -> dict[str, Any] | None:
        if not self._body.logprobs or entries is None:
            return None
        return chat_logprobs(self._vocabulary, entries, self._body.top_logprobs or 0)

    @staticmethod
    def _piece(
        index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
