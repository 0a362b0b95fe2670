"""One socket of `/v1/realtime`: what the client sends is carried out in order; every error is told and survived."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, ClassVar, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from polymux.core.errors import InvalidRequest, Overloaded, PolymuxError, TooLarge
from polymux.gateway.call import Call
from polymux.gateway.errors import ClientLeft, explain_validation, wrap_unexpected
from polymux.gateway.ids import draw_id
from polymux.gateway.realtime.audio import Ear
from polymux.gateway.realtime.conversation import Conversation, Item
from polymux.gateway.realtime.frames import ActiveResponse, NoResponse, read_event, read_item
from polymux.gateway.realtime.hearing import Hearing
from polymux.gateway.realtime.inbox import Inbox
from polymux.gateway.realtime.models import Models
from polymux.gateway.realtime.plan import Plan, make_plan
from polymux.gateway.realtime.response import Response
from polymux.gateway.realtime.transcript import Transcript, refuse_commit
from polymux.gateway.schemas.realtime import (
    Append,
    ClientEvent,
    ItemCreate,
    ItemReference,
    ItemTruncate,
    ResponseCancel,
    ResponseCreate,
    ResponseRequest,
    Session,
    SessionUpdate,
)
from polymux.gateway.state import Gateway
from polymux.gateway.turn import Turn

MAX_AUDIO = 15 * 2**20
"""Bytes of sound in one event."""
LONGEST = 24 * 3600.0
"""Seconds that a session lasts at most."""

TRY_AGAIN = 1013
INTERNAL = 1011

Event = TypeVar("Event", bound=ClientEvent)


class RealtimeSocket:
    """`run` returns when the client has left."""

    def __init__(self, websocket: WebSocket, gateway: Gateway, session: Session, request_id: str) -> None:
        self.session = session
        self.id = f"sess_{draw_id()}"
        self.conversation = Conversation()
        self._websocket = websocket
        self._inbox = Inbox(websocket)
        self._gateway = gateway
        self._models = Models(gateway)
        self._request_id = request_id
        self._expires = time.time() + LONGEST
        self._sending = asyncio.Lock()
        self._hearing: Hearing | None = None
        self._transcript: Transcript | None = None
        self._response: Response | None = None
        self._answering: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._spoken = False

    async def run(self) -> None:
        with suppress(ClientLeft):
            try:
                await self.send("session.created", session=self._show())
                async with asyncio.timeout(LONGEST):
                    await self._inbox.serve(self._carry_out())
            except TimeoutError:
                await self.fail(InvalidRequest("this session has lasted long enough", code="session_expired"))
                await self._websocket.close(1000)
            finally:
                await self._close()

    # ---- what goes out ----

    async def send(self, type: str, **fields: Any) -> None:
        """Raises `ClientLeft`, also where it was sent away."""
        event = {"type": type, "event_id": f"event_{draw_id()}", **fields}
        text = msgspec.json.encode(event).decode()
        async with self._sending:
            self._check_client()
            try:
                await self._websocket.send_text(text)
            except WebSocketDisconnect:
                raise ClientLeft from None

    def _check_client(self) -> None:
        """Raises `ClientLeft` where a send has found that out, or the socket was closed."""
        if self._websocket.application_state is WebSocketState.DISCONNECTED:
            raise ClientLeft

    async def fail(self, error: PolymuxError, event_id: str | None = None) -> None:
        body = {
            "type": error.type,
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "event_id": event_id,
        }
        await self.send("error", error=body)

    # ---- what comes in ----

    async def _carry_out(self) -> None:
        turn = Turn()
        while True:
            frame = await self._inbox.take()
            self._check_client()  # what it has sent before is for nobody
            event_id: str | None = None
            try:
                wire = read_event(frame)
                event_id = wire["event_id"] if isinstance(wire.get("event_id"), str) else None
                await self._handle(wire)
            except PolymuxError as error:
                await self.fail(error, event_id)
            except ClientLeft:
                raise
            except Exception as error:
                await self.fail(wrap_unexpected(error), event_id)
            await turn.pass_on()

    async def _handle(self, wire: dict[str, Any]) -> None:
        type = wire.get("type")
        if not isinstance(type, str):
            raise InvalidRequest("an event needs a type", param="type", code="missing_required_parameter")
        found = self._handlers.get(type)
        if found is None:
            known = ", ".join(self._handlers)
            raise InvalidRequest(f"unknown event {type[:80]!r}; known: {known}", param="type", code="unknown_event")
        schema, handle = found
        try:
            event = schema.model_validate(wire)
        except ValidationError as error:
            raise explain_validation(error) from None
        await handle(self, event)

    async def _update(self, event: SessionUpdate) -> None:
        session = self.session.patch(event.session)
        before = self.session
        if session.model != before.model and before.model is not None:
            raise InvalidRequest("the model of a session cannot be changed", param="session.model")
        if self._spoken and session.audio.output.voice != before.audio.output.voice:
            raise InvalidRequest("the voice cannot be changed once it has spoken", param="session.audio.output.voice")
        self._models.check(session)
        if self._hearing is not None and not self._hearing.over:
            await self._retune(self._hearing, before, session)
        self.session = session
        if self._transcript is not None:
            self._transcript.shown = self._shown
        await self.send("session.updated", session=self._show())

    async def _retune(self, hearing: Hearing, before: Session, session: Session) -> None:
        if self._models.listener(session) != self._models.listener(before):
            self._start(hearing.leave())  # what was committed is still written down by the model that heard it
            self._hearing = self._transcript = None
            return
        if session.listen != before.listen:
            await hearing.amend(session.listen)
        if session.audio.input.format != before.audio.input.format:
            hearing.ear = Ear(session.audio.input.format.type)

    async def _append(self, event: Append) -> None:
        if len(event.audio) > MAX_AUDIO * 4 // 3 + 4:
            raise TooLarge(f"one event may hold {MAX_AUDIO} bytes of sound", param="audio")
        try:
            data = base64.b64decode(event.audio, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidRequest(f"audio is not base64: {error}", param="audio", code="invalid_audio") from None
        hearing = await self._listen()
        await hearing.hear(data)

    async def _commit(self, event: ClientEvent) -> None:
        if self._hearing is None or self._transcript is None or self._hearing.over:
            raise refuse_commit(0.0)
        self._transcript.commits.append(event.event_id)
        self._hearing.commit()

    async def _clear(self, event: ClientEvent) -> None:
        if self._hearing is None or self._hearing.over:
            await self.send("input_audio_buffer.cleared")
        else:
            self._hearing.ear = Ear(self.session.audio.input.format.type)
            self._hearing.clear()

    async def _create_item(self, event: ItemCreate) -> None:
        item = read_item(event.item)
        previous = self.conversation.add(item, event.previous_item_id)
        await self.send("conversation.item.added", item=item.show(), previous_item_id=previous)
        await self.send("conversation.item.done", item=item.show(), previous_item_id=previous)

    async def _retrieve_item(self, event: ItemReference) -> None:
        await self.send("conversation.item.retrieved", item=self.conversation.find(event.item_id).show())

    async def _delete_item(self, event: ItemReference) -> None:
        item = self.conversation.remove(event.item_id)
        await self.send("conversation.item.deleted", item_id=item.id)

    async def _truncate_item(self, event: ItemTruncate) -> None:
        self.conversation.truncate(event.item_id, event.audio_end_ms)
        if self._response is not None and self._response.item.id == event.item_id:
            self._response.stop("client_cancelled")
        await self.send(
            "conversation.item.truncated",
            item_id=event.item_id,
            content_index=event.content_index,
            audio_end_ms=event.audio_end_ms,
        )

    async def _create_response(self, event: ResponseCreate) -> None:
        if self.session.type == "transcription":
            raise InvalidRequest("a transcription session gives no answers", code="invalid_session")
        if self._response is not None:
            raise ActiveResponse(f"the conversation has an active response already: {self._response.id}")
        self._respond(make_plan(self.session, event.response, self.conversation, self._models))

    async def _cancel_response(self, event: ResponseCancel) -> None:
        response = self._response
        if response is None or event.response_id not in (None, response.id):
            raise NoResponse("there is no such active response to cancel", param="response_id")
        response.stop("client_cancelled")

    _handlers: ClassVar[dict[str, tuple[type[ClientEvent], Callable[..., Awaitable[None]]]]] = {
        "session.update": (SessionUpdate, _update),
        "input_audio_buffer.append": (Append, _append),
        "input_audio_buffer.commit": (ClientEvent, _commit),
        "input_audio_buffer.clear": (ClientEvent, _clear),
        "conversation.item.create": (ItemCreate, _create_item),
        "conversation.item.retrieve": (ItemReference, _retrieve_item),
        "conversation.item.delete": (ItemReference, _delete_item),
        "conversation.item.truncate": (ItemTruncate, _truncate_item),
        "response.create": (ResponseCreate, _create_response),
        "response.cancel": (ResponseCancel, _cancel_response),
    }

    # ---- listening ----

    async def _listen(self) -> Hearing:
        """The listening job; it is opened when the first sound comes, and again after it has failed."""
        if self._hearing is not None and not self._hearing.over:
            return self._hearing
        transcript = Transcript(self.conversation, self.send, self.fail, self._on_speech, self._on_text)
        transcript.shown = self._shown
        call = self._open_call(self._models.listener(self.session), "listen", self.session.listen)

        async def fail(error: PolymuxError) -> None:
            await transcript.break_off(error)
            await self.fail(error)
            if isinstance(error, Overloaded):
                await self._websocket.close(TRY_AGAIN, "too busy: try again later")

        hearing = Hearing(call, Ear(self.session.audio.input.format.type), transcript.tell, fail)
        self._hearing, self._transcript = hearing, transcript
        await hearing.open()
        return hearing

    @property
    def _shown(self) -> bool:
        return self.session.type == "transcription" or self.session.audio.input.transcription is not None

    def _on_speech(self) -> None:
        """Somebody begins to speak: whoever is speaking lets them."""
        detection = self.session.audio.input.turn_detection
        if self._response is not None and detection is not None and detection.interrupt_response:
            self._response.stop("turn_detected")

    async def _on_text(self, item: Item) -> None:
        """An utterance is written down. In a voice loop it is answered, unless nothing was said."""
        detection = self.session.audio.input.turn_detection
        if self.session.type != "realtime" or detection is None or not detection.create_response:
            return
        if self._response is not None and self._response.stopped and self._answering is not None:
            await asyncio.wait([self._answering])  # it was interrupted by this very utterance
        if item.text.strip() and self._response is None:
            self._respond(make_plan(self.session, ResponseRequest(), self.conversation, self._models))

    # ---- answering ----

    def _respond(self, plan: Plan) -> None:
        self._response = response = Response(plan, self.conversation, self.send, self._open_call)
        self._spoken = self._spoken or plan.mouth is not None

        async def run() -> None:
            try:
                await response.run()
            finally:
                if self._response is response:
                    self._response = None

        self._answering = self._start(run())

    # ---- the rest ----

    def _open_call(self, model: str, task: str, ask: msgspec.Struct) -> Call:
        return Call(self._gateway, model, task, ask, weight=1, request_id=self._request_id)

    def _show(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.session.object,
            "expires_at": int(self._expires),
            **self.session.echo(),
        }

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def run() -> None:
            with suppress(ClientLeft):
                await coroutine

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _close(self) -> None:
        """Nothing goes on for a client that has left."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if self._hearing is not None:
            await self._hearing.close()
        await asyncio.gather(*tasks, return_exceptions=True)
