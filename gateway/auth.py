"""API keys: everything is closed but the probes and the pages that hold no secret."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from polymux.core.errors import Unauthorized
from polymux.gateway.errors import answer_error

OPEN_PATHS = frozenset({"/livez", "/readyz", "/docs", "/openapi.json"})


class Auth:
    """Asks for `Authorization: Bearer KEY`, or `X-Api-Key: KEY`, when there are keys.

    Closed by default: new paths need no thought.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self.app = app
        self.digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self.digests or scope["path"] in OPEN_PATHS or self._admits(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "a valid API key is required"})
        else:
            error = Unauthorized("a valid API key is required: 'Authorization: Bearer KEY'")
            await answer_error(error)(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        """Compares digests, all of them: neither the length nor the place of a difference shows in the time."""
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        bare = [value for name, value in scope["headers"] if name == b"x-api-key"]
        if len(sent) + len(bare) != 1:
            return False
        scheme, _, token = sent[0].partition(b" ") if sent else (b"bearer", b"", bare[0])
        digest = _digest(token.strip())
        matches = [hmac.compare_digest(digest, each) for each in self.digests]
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
