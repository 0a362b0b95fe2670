"""`POST /v1/audio/speech`: sound as it is spoken."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from polymux.core.errors import PolymuxError
from polymux.core.tasks import Done, Sound
from polymux.gateway.answering import EventFrames, Headers, StreamResponse, WholeResponse, frame_model
from polymux.gateway.bodies import read_request
from polymux.gateway.encoding import Encoder, open_encoder
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.routes.opening import open_call
from polymux.gateway.schemas.speech import SpeechEvent, SpeechRequest
from polymux.gateway.schemas.transcriptions import SpeechUsage
from polymux.gateway.schemas.usage import ReceiptBody
from polymux.gateway.state import gateway_of


async def speak_text(request: Request) -> ASGIApp:
    body = await read_request(request, SpeechRequest, gateway_of(request).settings.max_body_bytes)
    call = open_call(request, body.model, "speak", body.ask(), weight=1)
    whole = body.stream is False
    encoder = open_encoder(body.response_format or "mp3", whole=whole)
    if whole:
        return WholeResponse(call, WholeSpeech(encoder), describe_media(encoder))
    if body.stream_format == "sse":
        return StreamResponse(call, SpeechEvents(encoder))
    return StreamResponse(call, SpeechBytes(encoder))


ENDPOINT = Endpoint(
    method="POST",
    path="/v1/audio/speech",
    summary="Say a text aloud",
    tag="audio",
    handle=speak_text,
    request=SpeechRequest,
    stream=SpeechEvent,
    media="audio/*",
)


def describe_media(encoder: Encoder) -> Headers:
    return ((b"content-type", encoder.media),)


class WholeSpeech:
    """Collects the sound, and encodes it at the end: what a file says about its length is then true."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.sounds: list[Sound] = []

    def add(self, answer: msgspec.Struct) -> None:
        if isinstance(answer, Sound):
            self.sounds.append(answer)

    def finish(self, done: Done) -> bytes | Awaitable[bytes]:
        return spare_loop(self.encoder, self._encode)

    def _encode(self) -> bytes:
        return b"".join([*(self.encoder.encode(sound) for sound in self.sounds), self.encoder.finish()])


class SpeechBytes:
    """The file itself, piece by piece. A failure on the way cuts the connection: bytes have no error."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.headers = describe_media(encoder)

    def write(self, answer: msgspec.Struct) -> bytes | Awaitable[bytes]:
        return spare_loop(self.encoder, encode_answer, self.encoder, answer)

    def fail(self, error: PolymuxError) -> bytes:
        raise error

    def close(self) -> bytes:
        return b""


class SpeechEvents(EventFrames):
    """The same bytes in base64, an event for each piece, and what they cost at the end."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder

    def write(self, answer: msgspec.Struct) -> bytes | Awaitable[bytes]:
        return spare_loop(self.encoder, self._frame, answer)

    def _frame(self, answer: msgspec.Struct) -> bytes:
        data = encode_answer(self.encoder, answer)
        frames = b""
        if data:
            frames = frame_model(SpeechEvent(type="speech.audio.delta", audio=base64.b64encode(data).decode()))
        if isinstance(answer, Done):
            usage, receipt = SpeechUsage.of(answer.usage), ReceiptBody.of(answer.receipt)
            frames += frame_model(SpeechEvent(type="speech.audio.done", usage=usage, receipt=receipt))
        return frames


def encode_answer(encoder: Encoder, answer: msgspec.Struct) -> bytes:
    if isinstance(answer, Sound):
        return encoder.encode(answer)
    return encoder.finish() if isinstance(answer, Done) else b""


def spare_loop(encoder: Encoder, work: Callable[..., bytes], *arguments: Any) -> bytes | Awaitable[bytes]:
    """`work(*arguments)`: on a thread if the encoder would hold up the event loop."""
    return asyncio.to_thread(work, *arguments) if encoder.is_slow else work(*arguments)
