"""`POST /v1/audio/speech`: the request and its events."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, Tag, model_validator

from polymux.core.tasks import Speak
from polymux.gateway.encoding import Format
from polymux.gateway.schemas.base import WireAnswer, WireRequest, by_type, choose, maybe, only
from polymux.gateway.schemas.transcriptions import SpeechUsage
from polymux.gateway.schemas.usage import ReceiptBody

MAX_INPUT = 20_000
"""Characters: two thousand words and more. OpenAI itself takes 4,096."""


class VoiceId(WireRequest):
    id: str


Voice = Annotated[
    Annotated[str, Tag("<name>")] | Annotated[VoiceId, Tag("<id>")],
    choose(by_type({str: "<name>", dict: "<id>"}), 'a name or {"id": a name}'),
]


class SpeechRequest(WireRequest):
    model: str
    input: str = Field(min_length=1, max_length=MAX_INPUT)
    voice: Voice | None = Field(
        None, description="One of the model's voices; OpenAI's names that it lacks mean its default, as does none."
    )
    response_format: Format | None = Field(
        None, description="Default mp3. All are 24 kHz, one channel; pcm is little-endian int16 without a header."
    )
    speed: float | None = Field(None, ge=0.25, le=4, description="Default 1.")
    stream_format: Literal["audio", "sse"] | None = Field(None, description="Default audio.")
    stream: bool | None = Field(
        None, description="Extension. false: one body, whose header says how long it is. Default true."
    )
    input_type: Literal["text", "ssml", "phonemes"] | None = Field(
        None,
        description="Extension. ssml: speak, p, s, break, prosody with a rate, sub and say-as; phonemes: in the "
        "voice's own alphabet. Default text.",
    )
    seed: int | None = Field(
        None, ge=0, lt=1 << 63, description="Extension: the same seed gives the same sound, where a voice draws at all."
    )
    instructions: Annotated[str | None, only("", reason="no voice here takes instructions")] = None

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream is False and self.stream_format == "sse":
            raise ValueError("stream_format sse needs stream")
        return self

    def ask(self) -> Speak:
        voice = self.voice.id if isinstance(self.voice, VoiceId) else self.voice
        return Speak(
            text=self.input,
            voice=voice,
            speed=1.0 if self.speed is None else self.speed,
            kind=self.input_type or "text",
            seed=self.seed,
        )


class SpeechEvent(WireAnswer):
    """`audio`, in base64, in a speech.audio.delta; `usage` and `receipt` in the speech.audio.done at the end.

    Tokens are what the voice reads and makes: phonemes in, frames of sound out.
    """

    type: Literal["speech.audio.delta", "speech.audio.done"]
    audio: str | None = maybe()
    usage: SpeechUsage | None = maybe()
    receipt: ReceiptBody | None = maybe()
