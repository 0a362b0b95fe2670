"""The outermost layer: every request gets an id, an answer and one line in the log."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polymux.gateway.call import Call
from polymux.gateway.errors import CLIENT_LEFT, ClientLeft, answer_error, wrap_unexpected
from polymux.gateway.ids import draw_id
from polymux.gateway.state import Gateway

logger = logging.getLogger("polymux.access")

GOOD_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class Access:
    """Pure ASGI, so that `receive` reaches the endpoints unwrapped and they see a client leave."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self.app = app
        self.gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin = time.perf_counter()
        request_id = _accept_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                if self.gateway.draining:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            await self.app(scope, receive, send_marked)
        except (ClientLeft, ClientDisconnect):
            status = CLIENT_LEFT
        except Exception as error:
            if status:
                raise
            await answer_error(wrap_unexpected(error))(scope, receive, send_marked)
        finally:
            self._record(scope, status, time.perf_counter() - begin)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "")  # never the raw path: a label for each would grow without bound
        # nor a method that no route takes
        method = "" if status == 405 or (status == 404 and not path) else scope["method"]
        self.gateway.metrics.requests.labels(method, path, status).inc()
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", msgspec.json.encode(_line(scope, status, seconds)).decode())


def _line(scope: Scope, status: int, seconds: float) -> dict[str, Any]:
    """Facts about a request; never what it said."""
    client = scope.get("client")
    line: dict[str, Any] = {
        "time": round(time.time(), 3),
        "request": scope["state"]["request_id"],
        "client": client[0] if client else None,
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": status,
        "ms": round(seconds * 1000, 2),
    }
    call = scope["state"].get("call")
    if isinstance(call, Call):
        line |= {"model": call.model, "task": call.task, "outcome": call.outcome}
        if call.done is not None:
            line |= {"input": call.done.usage.input_tokens, "output": call.done.usage.output_tokens}
    return line


def _accept_id(scope: Scope) -> str:
    """The client's X-Request-ID where it is a plain token, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and GOOD_ID.fullmatch(value):
            return str(value, "ascii")
    return draw_id()
