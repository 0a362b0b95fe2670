"""`/v1/audio/stream`: a socket and a POST."""

from __future__ import annotations

import asyncio

import msgspec
from pydantic import Field
from starlette.requests import ClientDisconnect, Request
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from polymux.core.errors import PolymuxError
from polymux.gateway.errors import describe_error
from polymux.gateway.ids import draw_id
from polymux.gateway.realtime.inbox import Inbox
from polymux.gateway.realtime.lines import LineStream
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.schemas.base import WireAnswer, maybe
from polymux.gateway.state import gateway_of
from polymux.gateway.turn import Turn

POLICY = 1008
PATH = "/v1/audio/stream"


class StreamLine(WireAnswer):
    """One line: start and stop of an utterance, a delta of its text, its final text, or an error, which is last."""

    type: str
    utterance: int | None = maybe("Counted from 0.")
    time: float | None = maybe("Seconds into the sound.")
    text: str | None = maybe()
    seconds: float | None = Field(None, description="How long the utterance lasts.")


async def stream_body(request: Request) -> ASGIApp:
    stream = LineStream(gateway_of(request), request.query_params, request.state.request_id)
    await stream.open()
    return BodyStream(request, stream)


class BodyStream:
    """An ASGI response that begins with the job, and goes on while the body still arrives.

    Nobody else may ask for messages meanwhile: each could be sound.
    """

    def __init__(self, request: Request, stream: LineStream) -> None:
        self.request = request
        self.stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        feeding = asyncio.create_task(self._feed())
        try:
            headers = [(b"content-type", b"application/x-ndjson")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for line in self.stream.lines():
                await send({"type": "http.response.body", "body": line, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            feeding.cancel()
            await self.stream.close()

    async def _feed(self) -> None:
        try:
            async for data in self.request.stream():
                await self.stream.feed(data)
        except ClientDisconnect:
            await self.stream.leave()
        else:
            await self.stream.finish()


async def stream_socket(websocket: WebSocket) -> None:
    await websocket.accept()
    try:
        stream = LineStream(gateway_of(websocket), websocket.query_params, draw_id())
        await stream.open()
    except PolymuxError as error:
        await websocket.send_text(msgspec.json.encode({"type": "error", **describe_error(error)}).decode())
        await websocket.close(POLICY, error.message[:100])
        return
    telling = asyncio.create_task(tell_lines(websocket, stream))
    inbox = Inbox(websocket)
    try:
        await inbox.serve(carry_out(websocket, inbox, stream, telling))
    except WebSocketDisconnect:
        pass
    finally:
        telling.cancel()
        await stream.close()
        await asyncio.gather(telling, return_exceptions=True)


async def carry_out(websocket: WebSocket, inbox: Inbox, stream: LineStream, telling: asyncio.Task[None]) -> None:
    turn = Turn()
    while not telling.done():
        frame = await inbox.take()
        if frame.get("bytes") is not None:
            await stream.feed(frame["bytes"])
        elif frame.get("text") == "commit":
            stream.hearing.commit()
        elif frame.get("text") == "end":
            await stream.finish()
            await telling
            await websocket.close()
            return
        else:
            await websocket.send_text('{"type":"error","error":{"message":"send sound, commit or end"}}')
        await turn.pass_on()


async def tell_lines(websocket: WebSocket, stream: LineStream) -> None:
    async for line in stream.lines():
        await websocket.send_text(line.decode().rstrip())


ENDPOINT = Endpoint(
    method="POST",
    path=PATH,
    summary="Raw sound in, lines of JSON out while it still arrives",
    tag="audio",
    handle=stream_body,
    request_media="application/octet-stream",
    stream=StreamLine,
    media="application/x-ndjson",
)

SOCKETS = [WebSocketRoute(PATH, stream_socket)]
