"""How a job's answers become one HTTP response: a whole body, or a stream whose status is still honest.

Nothing is sent before the first answer is there, so a failure until then has its real status; a failure after it
becomes an error frame.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

import msgspec
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from polymux.core.errors import InternalError, PolymuxError
from polymux.core.tasks import Done
from polymux.gateway.call import Call, watch_client
from polymux.gateway.errors import describe_error

Headers = Sequence[tuple[bytes, bytes]]

JSON: Headers = ((b"content-type", b"application/json"),)
EVENTS: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
DONE = b"data: [DONE]\n\n"


class Whole(Protocol):
    """Collects answers into one body."""

    def add(self, answer: msgspec.Struct) -> None: ...

    def finish(self, done: Done) -> bytes | Awaitable[bytes]:
        """What would hold up the event loop is done elsewhere and awaited."""
        ...


class Stream(Protocol):
    """Turns each answer into bytes for the wire; `Done` is the last one."""

    headers: Headers

    def write(self, answer: msgspec.Struct) -> bytes | Awaitable[bytes]: ...

    def fail(self, error: PolymuxError) -> bytes: ...

    def close(self) -> bytes: ...


class WholeResponse:
    """An ASGI response. `Content-Length` is always there: no client waits for more."""

    def __init__(self, call: Call, whole: Whole, headers: Headers = JSON) -> None:
        self.call = call
        self.whole = whole
        self.headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["call"] = self.call
        async with watch_client(self.call.gateway, receive), self.call.answers() as answers:
            async for answer in answers:
                if not isinstance(answer, Done):
                    self.whole.add(answer)
            if self.call.done is None:
                raise InternalError("the job ended without its last answer")
            body = self.whole.finish(self.call.done)
            if not isinstance(body, bytes):
                body = await body
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [*self.headers, length]})
        await send({"type": "http.response.body", "body": body})


class StreamResponse:
    """An ASGI response that starts with the first answer."""

    def __init__(self, call: Call, stream: Stream) -> None:
        self.call = call
        self.stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["call"] = self.call
        started = False
        tail = b""
        try:
            async with watch_client(self.call.gateway, receive), self.call.answers() as answers:
                async for answer in answers:
                    data = self.stream.write(answer)
                    if not isinstance(data, bytes):
                        data = await data
                    if not started:
                        start = {"type": "http.response.start", "status": 200, "headers": list(self.stream.headers)}
                        await send(start)
                        started = True
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                if self.call.done is None:
                    raise InternalError("the job ended without its last answer")
        except PolymuxError as error:
            if not started:
                raise
            tail = self.stream.fail(error)
        await send({"type": "http.response.body", "body": tail + self.stream.close(), "more_body": False})


class EventFrames:
    """What all server-sent event streams share: frames of JSON, errors as a frame, one [DONE]."""

    headers = EVENTS

    def fail(self, error: PolymuxError) -> bytes:
        return frame_json(msgspec.json.encode(describe_error(error)))

    def close(self) -> bytes:
        return DONE


def encode_model(model: BaseModel) -> bytes:
    """JSON. A number that is not finite becomes null: the body is always valid."""
    return model.__pydantic_serializer__.to_json(model)


def frame_json(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


def frame_model(model: BaseModel) -> bytes:
    return frame_json(encode_model(model))
