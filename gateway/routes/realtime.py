"""`/v1/realtime` (a socket), and `POST /v1/realtime/client_secrets` (keys for browsers)."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from polymux.core.errors import PolymuxError
from polymux.gateway.answering import encode_model
from polymux.gateway.auth import read_tokens
from polymux.gateway.bodies import read_request
from polymux.gateway.errors import ClientLeft
from polymux.gateway.ids import draw_id
from polymux.gateway.realtime.models import Models
from polymux.gateway.realtime.socket import RealtimeSocket
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.schemas.base import WireAnswer, WireRequest
from polymux.gateway.schemas.realtime import Session
from polymux.gateway.state import Gateway, gateway_of

POLICY = 1008
"""Closed for good: a client that tries again fares no better."""


async def open_socket(websocket: WebSocket) -> None:
    gateway = gateway_of(websocket)
    offered = websocket.scope.get("subprotocols", ())
    await websocket.accept(subprotocol="realtime" if "realtime" in offered else None)
    request_id = draw_id()
    try:
        session = choose_session(websocket, gateway)
        Models(gateway).check(session)
    except PolymuxError as error:
        with suppress(ClientLeft):
            await RealtimeSocket(websocket, gateway, Session.open("realtime", None), request_id).fail(error)
            await websocket.close(POLICY, error.message[:100])
        return
    await RealtimeSocket(websocket, gateway, session, request_id).run()


def choose_session(websocket: WebSocket, gateway: Gateway) -> Session:
    """What the client secret says, else what the address does. A model that can only listen is there to transcribe."""
    model = websocket.query_params.get("model")
    for token in read_tokens(websocket.scope):
        if (secret := gateway.secrets.find(token.decode("latin-1"))) is not None:
            return secret.session
    transcribes = websocket.query_params.get("intent") == "transcription"
    if model is not None and not transcribes:
        tasks = gateway.service.find(model).tasks
        transcribes = "listen" in tasks and "chat" not in tasks and "speak" not in tasks
    return Session.open("transcription" if transcribes else "realtime", model)


class SecretExpiry(WireRequest):
    anchor: Literal["created_at"] = "created_at"
    seconds: int = Field(600, ge=10, le=7200)


class SecretRequest(WireRequest):
    expires_after: SecretExpiry = SecretExpiry()
    session: dict[str, Any] = Field({}, description="As in session.update.")


class ClientSecret(WireAnswer):
    value: Annotated[str, Field(description="Opens sockets of /v1/realtime; nothing else.")]
    expires_at: int
    session: dict[str, Any]


async def issue_secret(request: Request) -> ASGIApp:
    gateway = gateway_of(request)
    body = await read_request(request, SecretRequest, gateway.settings.max_body_bytes)
    session = Session.open("realtime", None).patch(body.session)
    Models(gateway).check(session)
    secret = gateway.secrets.issue(session, body.expires_after.seconds)
    shown = {"id": f"sess_{draw_id()}", "object": session.object, **session.echo()}
    answer = ClientSecret(value=secret.value, expires_at=secret.expires, session=shown)
    return Response(encode_model(answer), media_type="application/json")


ENDPOINT = Endpoint(
    method="POST",
    path="/v1/realtime/client_secrets",
    summary="A short-lived key that opens sockets of /v1/realtime",
    tag="audio",
    handle=issue_secret,
    request=SecretRequest,
    response=ClientSecret,
)

SOCKETS = [WebSocketRoute("/v1/realtime", open_socket)]
