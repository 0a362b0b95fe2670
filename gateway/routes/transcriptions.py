"""`POST /v1/audio/transcriptions` and `POST /v1/audio/translations`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from polymux.core.errors import InternalError
from polymux.core.tasks import Done, Heard, Reached, Segment, TextDelta
from polymux.gateway.answering import (
    JSON,
    EventFrames,
    Headers,
    StreamResponse,
    WholeResponse,
    encode_model,
    frame_model,
)
from polymux.gateway.arriving import answer_form
from polymux.gateway.bodies import check_request
from polymux.gateway.forms import FormStream
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.routes.opening import open_call
from polymux.gateway.routes.subtitles import write_srt, write_vtt
from polymux.gateway.schemas.transcriptions import (
    DurationUsage,
    SpeechUsage,
    Transcript,
    TranscriptEvent,
    TranscriptionRequest,
    TranscriptSegment,
    TranscriptWord,
    TranslationRequest,
    VerboseTranscript,
)
from polymux.gateway.schemas.usage import ReceiptBody
from polymux.gateway.state import gateway_of

TEXT: Headers = ((b"content-type", b"text/plain; charset=utf-8"),)

TaskName = Literal["transcribe", "translate"]


async def transcribe_audio(request: Request) -> ASGIApp:
    return await _answer(request, "transcribe", TranscriptionRequest)


async def translate_audio(request: Request) -> ASGIApp:
    return await _answer(request, "translate", TranslationRequest)


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/audio/transcriptions",
        summary="Write down what a recording says",
        tag="audio",
        handle=transcribe_audio,
        request=TranscriptionRequest,
        request_media="multipart/form-data",
        response=VerboseTranscript,
        stream=TranscriptEvent,
    ),
    Endpoint(
        method="POST",
        path="/v1/audio/translations",
        summary="Write down in English what a recording says",
        tag="audio",
        handle=translate_audio,
        request=TranslationRequest,
        request_media="multipart/form-data",
        response=VerboseTranscript,
    ),
)


async def _answer(request: Request, task: TaskName, schema: type[TranslationRequest]) -> ASGIApp:
    gateway = gateway_of(request)
    stream = FormStream(request, gateway.settings.max_upload_bytes)

    def respond() -> ASGIApp:
        body = check_request(stream.form.gather(schema.lists), schema)
        call = open_call(request, body.model, task, body.ask(), weight=1)
        if isinstance(body, TranscriptionRequest) and body.stream:
            return StreamResponse(call, TranscriptStream(progress="progress" in (body.include or ())))
        headers = JSON if body.response_format in ("json", "verbose_json") else TEXT
        return WholeResponse(call, WholeTranscript(task, body.response_format, body.granularities), headers)

    return await answer_form(gateway, stream, respond)


class WholeTranscript:
    """Collects text and segments, and writes them in the format that was asked for."""

    def __init__(self, task: TaskName, format: str, granularities: Sequence[str]) -> None:
        self.task = task
        self.granularities = granularities
        self.format = format
        self.texts: list[str] = []
        self.segments: list[Segment] = []
        self.heard: Heard | None = None

    def add(self, answer: msgspec.Struct) -> None:
        if isinstance(answer, TextDelta):
            self.texts.append(answer.text)
        elif isinstance(answer, Segment):
            self.segments.append(answer)
        elif isinstance(answer, Heard):
            self.heard = answer

    def finish(self, done: Done) -> bytes:
        text = "".join(self.texts)
        usage, receipt = DurationUsage.of(done.usage), ReceiptBody.of(done.receipt)
        match self.format:
            case "text":
                return text.encode()
            case "srt":
                return write_srt(self.segments).encode()
            case "vtt":
                return write_vtt(self.segments).encode()
            case "json":
                return encode_model(Transcript(text=text, usage=usage, receipt=receipt))
        if self.heard is None:
            raise InternalError("the job did not say what it heard")
        segments = [TranscriptSegment.of(segment) for segment in self.segments]
        words = [
            TranscriptWord(word=word.text, start=word.start, end=word.end)
            for segment in self.segments
            for word in segment.words
        ]
        return encode_model(
            VerboseTranscript(
                task=self.task,
                language=self.heard.language,
                duration=self.heard.seconds,
                text=text,
                segments=segments if "segment" in self.granularities else None,
                words=words if "word" in self.granularities else None,
                usage=usage,
                receipt=receipt,
            )
        )


class TranscriptStream(EventFrames):
    """One event per piece of text, and the whole at the end; with `progress` also how far the work has come."""

    def __init__(self, *, progress: bool = False) -> None:
        self.texts: list[str] = []
        self.progress = progress

    def write(self, answer: msgspec.Struct) -> bytes:
        if isinstance(answer, TextDelta):
            self.texts.append(answer.text)
            return frame_model(TranscriptEvent(type="transcript.text.delta", delta=answer.text))
        if isinstance(answer, Reached) and self.progress:
            return frame_model(TranscriptEvent(type="transcript.progress", seconds=answer.seconds))
        if isinstance(answer, Done):
            return frame_model(
                TranscriptEvent(
                    type="transcript.text.done",
                    text="".join(self.texts),
                    usage=SpeechUsage.of(answer.usage),
                    receipt=ReceiptBody.of(answer.receipt),
                )
            )
        return b""
