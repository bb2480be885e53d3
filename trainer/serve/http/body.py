"""Request bodies: JSON, strictly. What Python's parser lets through and no JSON writer meant is refused here, once.

`JsonRoute` is the route class of every endpoint with a body; handlers get a validated model and need no thought of NaN,
lone surrogates, duplicate keys, endless numbers or a thousand brackets.
"""

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

from trainer.serve.http.errors import ApiError

MAX_DEPTH = 128
"""Brackets within brackets: far above any JSON schema, far below Python's recursion limit."""

_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)


def parse_json(raw: bytes) -> Any:
    """Parse a request body.

    raises  ApiError 400 with the reason if it is no JSON in UTF-8, nests deeper than MAX_DEPTH, repeats a key, or holds
            NaN, Infinity, an integer of thousands of digits or a lone surrogate
    """
    _check_depth(raw)
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        _refuse(f"it is not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        _refuse(f"{error.msg} at character {error.pos}")
    except ValueError:
        _refuse("an integer has too many digits")
    if rb"\ud" in raw or rb"\uD" in raw:
        try:
            json.dumps(body, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            _refuse("a string holds half of a surrogate pair (\\ud800 to \\udfff), which is no character")
    return body


def _check_depth(raw: bytes) -> None:
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(raw):
        match found[0][:1]:
            case b"[" | b"{":
                depth += 1
                if depth > MAX_DEPTH:
                    _refuse(f"it nests deeper than {MAX_DEPTH} levels")
            case b"]" | b"}":
                depth -= 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        for key, _ in pairs:
            if result.pop(key, result) is result:
                _refuse(f"the key {key[:80]!r} is repeated")
    return result


def _refuse_constant(name: str) -> NoReturn:
    _refuse(f"{name} is no JSON number")


def _refuse(reason: str) -> NoReturn:
    raise ApiError(400, f"the body is not accepted as JSON: {reason}; correct it", code="invalid_json")


class _JsonRequest(Request):
    """A request whose body is bounded and whose JSON is strict."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            limit = self.app.state.engine.config.max_body_bytes
            declared = self.headers.get("content-length", "")
            if declared.isdecimal() and int(declared[:20]) > limit:
                _too_long(limit)
            chunks, size = [], 0
            async for chunk in self.stream():
                size += len(chunk)
                if size > limit:  # a body without a length
                    _too_long(limit)
                chunks.append(chunk)
            self._body = b"".join(chunks)
            kind = self.headers.get("content-type", "").split(";")[0].strip().lower()
            if self._body and kind != "application/json":
                message = f"Content-Type is {kind or 'missing'}; send application/json"
                raise ApiError(415, message, code="unsupported_media_type")
        return self._body

    async def json(self) -> Any:
        return parse_json(await self.body())


def _too_long(limit: int) -> NoReturn:
    raise ApiError(
        413,
        f"the body exceeds {limit} bytes (max_body_bytes); send fewer or shorter prompts a call",
        code="body_too_long",
        headers={"Connection": "close"},
    )


class JsonRoute(APIRoute):
    """A route whose handler sees only bodies that `parse_json` accepts."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return strict
