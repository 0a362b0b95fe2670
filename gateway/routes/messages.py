"""`POST /v1/messages` and its token count: a chat, told as Anthropic's clients read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from polymux.core.errors import PolymuxError
from polymux.core.tasks import CallDelta, ChoiceEnded, Done, TextDelta, ThoughtDelta, Tokenize
from polymux.core.vocabulary import Usage
from polymux.gateway.answering import EVENTS, StreamResponse, WholeResponse, encode_model
from polymux.gateway.bodies import read_request
from polymux.gateway.errors import answer_error, describe_error
from polymux.gateway.ids import draw_id
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.routes.opening import open_call
from polymux.gateway.schemas.message import (
    BlockOut,
    CountAnswer,
    MessageBody,
    MessageEvent,
    MessageUsage,
    TextOut,
    ThinkingOut,
    ToolUseOut,
)
from polymux.gateway.schemas.messages import CountRequest, MessageRequest
from polymux.gateway.schemas.usage import ReceiptBody
from polymux.gateway.state import gateway_of

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
"""Their names for what went wrong, by status; other 4xx are an invalid_request_error."""


async def send_message(request: Request) -> ASGIApp:
    try:
        body = await read_request(request, MessageRequest, gateway_of(request).settings.max_body_bytes)
        call = open_call(request, body.model, "chat", body.ask(), weight=1)
    except PolymuxError as error:
        return Translated(error)
    growing = GrowingMessage(call.model)
    return Translating(StreamResponse(call, MessageStream(growing)) if body.stream else WholeResponse(call, growing))


async def count_tokens(request: Request) -> ASGIApp:
    try:
        body = await read_request(request, CountRequest, gateway_of(request).settings.max_body_bytes)
        call = open_call(request, body.model, "tokenize", Tokenize(chat=body.prompt()), weight=1)
    except PolymuxError as error:
        return Translated(error)
    return Translating(WholeResponse(call, WholeCount()))


ENDPOINTS = [
    Endpoint(
        method="POST",
        path="/v1/messages",
        summary="Continue a conversation, told as blocks",
        tag="text",
        handle=send_message,
        request=MessageRequest,
        response=MessageBody,
        stream=MessageEvent,
    ),
    Endpoint(
        method="POST",
        path="/v1/messages/count_tokens",
        summary="Count the tokens of a conversation",
        tag="text",
        handle=count_tokens,
        request=CountRequest,
        response=CountAnswer,
    ),
]


class GrowingMessage:
    """The message as it grows, and the events that say so. A new block begins where the kind of answer changes."""

    def __init__(self, model: str) -> None:
        self.body = MessageBody(id=f"msg_{draw_id()}", model=model, usage=MessageUsage(input_tokens=0, output_tokens=0))
        self._open = False
        self._arguments = ""

    def add(self, answer: msgspec.Struct) -> None:
        for _ in self.grow(answer):
            pass

    def finish(self, done: Done) -> bytes:
        for _ in self.complete(done):
            pass
        return encode_model(self.body)

    def grow(self, answer: msgspec.Struct) -> Iterator[dict[str, Any]]:
        if isinstance(answer, ChoiceEnded):
            stopped = answer.stop is not None
            self.body.stop_reason = "stop_sequence" if stopped else REASONS.get(answer.reason, answer.reason)
            self.body.stop_sequence = answer.stop
        elif isinstance(answer, TextDelta) and answer.text:
            yield from self._turn_to(TextOut)
            self._last(TextOut).text += answer.text
            yield self._delta({"type": "text_delta", "text": answer.text})
        elif isinstance(answer, ThoughtDelta) and answer.text:
            yield from self._turn_to(ThinkingOut)
            self._last(ThinkingOut).thinking += answer.text
            yield self._delta({"type": "thinking_delta", "thinking": answer.text})
        elif isinstance(answer, CallDelta):
            if answer.id is not None:
                yield from self._close()
                yield self._begin(ToolUseOut(id=answer.id, name=answer.name or ""))
            if answer.arguments:
                self._arguments += answer.arguments
                yield self._delta({"type": "input_json_delta", "partial_json": answer.arguments})

    def complete(self, done: Done) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self.body.usage = MessageUsage.of(done.usage)
        self.body.receipt = ReceiptBody.of(done.receipt)
        ending = {"stop_reason": self.body.stop_reason, "stop_sequence": self.body.stop_sequence}
        yield {"type": "message_delta", "delta": ending, "usage": self.body.usage.model_dump()}
        yield {"type": "message_stop"}

    def _turn_to(self, kind: type[TextOut] | type[ThinkingOut]) -> Iterator[dict[str, Any]]:
        if not self._open or not isinstance(self.body.content[-1], kind):
            yield from self._close()
            yield self._begin(kind())

    def _begin(self, block: BlockOut) -> dict[str, Any]:
        self.body.content.append(block)
        self._open = True
        self._arguments = ""
        return {"type": "content_block_start", "index": self._index, "content_block": block.model_dump(mode="json")}

    def _close(self) -> Iterator[dict[str, Any]]:
        if not self._open:
            return
        self._open = False
        block = self.body.content[-1]
        if isinstance(block, ToolUseOut):
            block.input = read_arguments(self._arguments)
        yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self.body.content) - 1

    def _last(self, kind: type[Any]) -> Any:
        block = self.body.content[-1]
        assert isinstance(block, kind)
        return block


def read_arguments(arguments: str) -> dict[str, Any]:
    """A call's arguments; empty when the answer was cut off inside them."""
    try:
        read = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {}
    return read if isinstance(read, dict) else {}


class MessageStream:
    """Server-sent events with names; there is no [DONE]."""

    headers = EVENTS

    def __init__(self, growing: GrowingMessage) -> None:
        self.growing = growing
        self._begun = False

    def write(self, answer: msgspec.Struct) -> bytes:
        growing = self.growing
        frames = b""
        if not self._begun:
            self._begun = True
            frames = frame({"type": "message_start", "message": growing.body.model_dump(mode="json")})
        events = growing.complete(answer) if isinstance(answer, Done) else growing.grow(answer)
        return frames + b"".join(map(frame, events))

    def fail(self, error: PolymuxError) -> bytes:
        return frame(describe_failure(error))

    def close(self) -> bytes:
        return b""


def frame(event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


class WholeCount:
    """Only the usage is wanted."""

    def add(self, answer: msgspec.Struct) -> None:
        """What the tokens are is not asked."""

    def finish(self, done: Done) -> bytes:
        usage: Usage = done.usage
        return encode_model(CountAnswer(input_tokens=usage.input_tokens))


def describe_failure(error: PolymuxError) -> dict[str, Any]:
    """An error in their shape, with our fields beside theirs."""
    fallback = (
        "invalid_request_error" if error.status < 500 else "overloaded_error" if error.status == 503 else "api_error"
    )
    described = describe_error(error)["error"]
    return {"type": "error", "error": {**described, "type": ERRORS.get(error.status, fallback)}}


class Translated:
    """A failure, as a response in their shape."""

    def __init__(self, error: PolymuxError) -> None:
        self.error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer_error(self.error, body=describe_failure(self.error))(scope, receive, send)


class Translating:
    """A response whose failure, as long as nothing is sent, is told in their shape."""

    def __init__(self, response: ASGIApp) -> None:
        self.response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.response(scope, receive, send)
        except PolymuxError as error:
            await Translated(error)(scope, receive, send)
