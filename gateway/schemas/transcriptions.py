"""`POST /v1/audio/transcriptions` and `/translations`: forms, answers and events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, WithJsonSchema, model_validator

from polymux.core.arrival import ArrivingFile
from polymux.core.tasks import Segment, Transcribe
from polymux.core.vocabulary import Usage
from polymux.gateway.schemas.base import WireAnswer, maybe
from polymux.gateway.schemas.usage import ReceiptBody

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
File = Annotated[InstanceOf[ArrivingFile], WithJsonSchema({"type": "string", "format": "binary"})]
"""A part of the form with a file name."""


class FormRequest(BaseModel):
    """A form that a client sends: everything in it is text, so numbers and booleans are read from text."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)
    lists: ClassVar[frozenset[str]] = frozenset()
    """Fields that may come several times."""


class Chunking(FormRequest):
    """How a recording is cut. A plain name stands for an object of that type."""

    type: Literal["auto", "seek", "server_vad"]
    threshold: float | None = Field(None, ge=0, le=1)
    prefix_padding_ms: int | None = Field(None, ge=0, le=30_000)
    silence_duration_ms: int | None = Field(None, ge=0, le=30_000)


def _read_chunking(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


def _read_seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


class TranslationRequest(FormRequest):
    file: File = Field(description="Any audio or video file; what it is, its content says.")
    model: str
    prompt: str | None = Field(None, description="Text as if it came before: names, spelling, style.")
    response_format: Format = "json"
    temperature: float | None = Field(
        None, ge=0, le=1, description="0, the default: the likeliest text, with draws where that cannot be trusted."
    )
    hotwords: str | None = Field(None, description="Words to expect, in every part of the recording.")
    beam_size: int | None = Field(
        None, ge=1, le=16, description="Texts followed at once at temperature 0; the default, 1, follows the likeliest."
    )
    best_of: int | None = Field(None, ge=1, le=16, description="Texts drawn at a temperature, the surest counts.")
    condition_on_previous_text: bool | None = Field(
        None, description="One part after another, each with what was said as its prompt."
    )
    chunking_strategy: Annotated[Chunking, BeforeValidator(_read_chunking)] | None = Field(
        None,
        description="auto, the default: cut where nobody speaks. seek: one part after another, each from where the "
        "last one's timestamps end. An object of type server_vad: as auto, with thresholds of its own.",
    )

    @model_validator(mode="after")
    def _check_chunking(self) -> Self:
        chunking = self.chunking_strategy
        if self.condition_on_previous_text and chunking is not None and chunking.type != "seek":
            raise ValueError("condition_on_previous_text needs chunking_strategy seek")
        return self

    @property
    def granularities(self) -> Sequence[str]:
        """What has times in a verbose answer."""
        return ("segment",)

    def ask(self) -> Transcribe:
        chunking = self.chunking_strategy or Chunking(type="auto")
        return Transcribe(
            audio=self.file.path if self.file.complete else self.file,
            prompt=self.prompt or "",
            temperature=self.temperature or 0.0,
            hotwords=self.hotwords or "",
            seek=chunking.type == "seek",
            remembers=bool(self.condition_on_previous_text),
            beam_size=self.beam_size or 1,
            best_of=self.best_of,
            threshold=chunking.threshold,
            silence=_read_seconds(chunking.silence_duration_ms),
            padding=_read_seconds(chunking.prefix_padding_ms),
        )


class TranscriptionRequest(TranslationRequest):
    lists = frozenset({"timestamp_granularities", "include"})

    language: str | None = Field(None, description="A code (en) or an English name. Default: detected.")
    stream: bool | None = Field(None, description="Events as the text is known.")
    timestamp_granularities: list[Literal["segment", "word"]] | None = Field(
        None, description="Only with response_format verbose_json."
    )
    include: list[Literal["progress"]] | None = Field(
        None, description="With stream: also transcript.progress events, which say how far into the recording it is."
    )

    @model_validator(mode="after")
    def _check_formats(self) -> Self:
        if self.stream and self.response_format not in ("json", "text"):
            raise ValueError("with stream, response_format must be json or text")
        if self.include and not self.stream:
            raise ValueError("include progress needs stream")
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise ValueError("timestamp_granularities needs response_format verbose_json")
        return self

    @property
    def granularities(self) -> Sequence[str]:
        return self.timestamp_granularities or ("segment",)

    def ask(self) -> Transcribe:
        ask = super().ask()
        ask.language = self.language
        ask.words = "word" in self.granularities
        return ask


class DurationUsage(WireAnswer):
    type: Literal["duration"] = "duration"
    seconds: float

    @classmethod
    def of(cls, usage: Usage) -> DurationUsage:
        return cls(seconds=usage.seconds)


class SpeechUsage(WireAnswer):
    """Tokens of the decoder. Audio is counted in seconds, elsewhere."""

    type: Literal["tokens"] = "tokens"
    input_tokens: int
    output_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> SpeechUsage:
        total = usage.input_tokens + usage.output_tokens
        return cls(input_tokens=usage.input_tokens, output_tokens=usage.output_tokens, total_tokens=total)


class Transcript(WireAnswer):
    text: str
    usage: DurationUsage
    receipt: ReceiptBody


class TranscriptSegment(WireAnswer):
    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float

    @classmethod
    def of(cls, segment: Segment) -> TranscriptSegment:
        return cls(**{name: getattr(segment, name) for name in cls.model_fields})


class TranscriptWord(WireAnswer):
    word: str
    start: float
    end: float


class VerboseTranscript(WireAnswer):
    """`words` and `segments` as `timestamp_granularities` asks for them; segments where it does not ask."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[TranscriptSegment] | None = maybe()
    words: list[TranscriptWord] | None = maybe()
    usage: DurationUsage
    receipt: ReceiptBody


class TranscriptEvent(WireAnswer):
    """`delta` in a transcript.text.delta; `seconds` of the recording that are written down in a transcript.progress;
    `text`, `usage` and `receipt` in the transcript.text.done at the end."""

    type: Literal["transcript.text.delta", "transcript.progress", "transcript.text.done"]
    delta: str | None = maybe()
    seconds: float | None = maybe()
    text: str | None = maybe()
    usage: SpeechUsage | None = maybe()
    receipt: ReceiptBody | None = maybe()
