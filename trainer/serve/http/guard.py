"""The API key: checked before anything else looks at a request."""

import hmac
import os

from starlette.types import ASGIApp, Receive, Scope, Send

from trainer.serve.http.errors import ApiError

KEY_VARIABLE = "LOWBIT_API_KEY"


def wanted_key(configured: str | None) -> str | None:
    """The key that clients must send: the configured one, else the environment's, else none."""
    return configured or os.environ.get(KEY_VARIABLE) or None


class ApiKeyGuard:
    """ASGI middleware: 401 for every path that is not open, unless `Authorization: Bearer <key>` is right."""

    def __init__(self, app: ASGIApp, *, key: str, open_paths: frozenset[str]) -> None:
        self._app, self._key, self._open_paths = app, key.encode(), open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths or self._is_right(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "the API key is missing or wrong; send `Authorization: Bearer <key>`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _is_right(self, scope: Scope) -> bool:
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, key = (sent[0] if len(sent) == 1 else b"").partition(b" ")
        # Compared in a time that does not tell how much of the key is right.
        return hmac.compare_digest(key.strip(), self._key) and kind.lower() == b"bearer"
