"""Errors as OpenAI writes them: `{"error": {message, type, param, code}}`, whatever went wrong and wherever.

A mistake of the client is 4xx and names the field; ours is 500 and says no more than that the log knows (the web
framework writes the traceback there).
"""

import math
import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from trainer.config.errors import UserError
from trainer.serve.interface import EngineDead, QueueFull

MAX_SHOWN = 120
"""Characters of a wrong value that an error quotes."""


class ApiError(HTTPException):
    """An answer other than 200. `type` is OpenAI's for the status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = {429: "rate_limit_error"}.get(
            self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error"
        )
        message = str(self.detail).encode("utf-8", "backslashreplace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status_code, self.headers)


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is not 2xx."""

    error: ErrorDetail


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is refused; the message names the field."},
    "5XX": {"model": ErrorBody, "description": "The server failed or is shutting down."},
}


def api_error(error: Exception) -> ApiError:
    """The answer for what a handler raised."""
    match error:
        case ApiError():
            return error
        case UserError():
            return ApiError(400, str(error), param=_named_field(str(error)))
        case QueueFull():
            seconds = max(1, math.ceil(error.retry_after_s))
            return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(seconds)})
        case EngineDead():
            return ApiError(503, str(error), code="engine_unavailable")
        case RequestValidationError():
            return _validation_error(error)
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case _:
            # The connection is closed behind such an answer, and clients that keep connections must know it.
            return ApiError(
                500,
                "internal error; the server's log has the details",
                code="internal_error",
                headers={"Connection": "close"},
            )


def install_error_handlers(app: FastAPI) -> None:
    """Answer every exception in the one shape."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return api_error(error).response()

    for kind in (UserError, QueueFull, EngineDead, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _named_field(message: str) -> str | None:
    """`temperature=3; ...` and `stop has ...` begin with the field's name, as the house's messages do."""
    found = re.match(r"([a-z_]+)(?:=|\[| has | is | needs |:)", message)
    return found[1] if found else None


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first complaint of pydantic, in our words."""
    first = error.errors()[0]
    # A body that is no object has the location ("body",); names of union members follow the field, and say nothing.
    where = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    field = ".".join(part for part in where if "[" not in part and "-" not in part)[:MAX_SHOWN]
    if first["type"] == "extra_forbidden":
        return ApiError(
            400,
            f"{field} is unknown here; remove it (nothing is ignored in silence)",
            param=field,
            code="unknown_field",
        )
    if first["type"] == "missing":
        return ApiError(400, f"{field or 'the body'} is missing; give it", param=field or None, code="missing_field")
    reason = str(first.get("ctx", {}).get("error") or first["msg"])
    shown = repr(first["input"])
    shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
    message = f"{field or 'the body'}={shown}; {reason[:1].lower()}{reason[1:]}"
    return ApiError(400, message, param=field or None, code="invalid_value")
