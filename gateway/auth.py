"""API keys: everything is closed but the probes and the pages that hold no secret."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from polymux.core.errors import Unauthorized
from polymux.gateway.errors import answer_error
from polymux.gateway.realtime.secrets import Secrets

SECRET_PATH = "/v1/realtime"
PROTOCOL_KEY = b"openai-insecure-api-key."

OPEN_PATHS = frozenset({"/livez", "/readyz", "/docs", "/openapi.json"})

OPEN_FOLDER = "/v1/images/files/"
"""What lies there has a name that nobody can guess: whoever was given it may read it, a browser too."""


class Auth:
    """Asks for `Authorization: Bearer KEY`, or `X-Api-Key: KEY`, when there are keys.

    Closed by default: new paths need no thought. A client secret opens sockets of `/v1/realtime` alone.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], secrets: Secrets) -> None:
        self.app = app
        self.digests = [_digest(key.encode()) for key in keys]
        self.secrets = secrets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self.digests or _is_open(scope["path"]) or self._admits(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "a valid API key is required"})
        else:
            error = Unauthorized("a valid API key is required: 'Authorization: Bearer KEY'")
            await answer_error(error)(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        """Compares digests, all of them: neither the length nor the place of a difference shows in the time."""
        tokens = read_tokens(scope)
        if len(tokens) != 1:
            return False
        digest = _digest(tokens[0])
        matches = [hmac.compare_digest(digest, each) for each in self.digests]
        return any(matches) or self._admits_secret(scope, tokens[0])

    def _admits_secret(self, scope: Scope, token: bytes) -> bool:
        socket = scope["type"] == "websocket" and scope["path"] == SECRET_PATH
        return socket and self.secrets.find(token.decode("latin-1")) is not None


def read_tokens(scope: Scope) -> list[bytes]:
    """The keys that a client shows. A browser cannot set headers of a socket: it names its key as a protocol."""
    tokens: list[bytes] = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            tokens.append(token.strip() if scheme.lower() == b"bearer" else b"")
        elif name == b"x-api-key":
            tokens.append(value.strip())
        elif name == b"sec-websocket-protocol" and scope["type"] == "websocket":
            offered = [protocol.strip() for protocol in value.split(b",")]
            tokens += [each.removeprefix(PROTOCOL_KEY) for each in offered if each.startswith(PROTOCOL_KEY)]
    return tokens


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
