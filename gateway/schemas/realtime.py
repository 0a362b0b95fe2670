"""`/v1/realtime`: the session's configuration, as it is patched and echoed."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from polymux.core.tasks import Listen, Turns
from polymux.gateway.errors import explain_validation
from polymux.gateway.realtime.audio import RATES, Format
from polymux.gateway.schemas.base import WireRequest, only

NO_DETECTOR = "only server_vad and null are supported"


class AudioFormat(WireRequest):
    type: Format = "audio/pcm"
    rate: int | None = None

    @model_validator(mode="after")
    def _check_rate(self) -> Self:
        if self.rate not in (None, RATES[self.type]):
            raise ValueError(f"{self.type} has {RATES[self.type]} samples a second here")
        return self


class InputTranscription(WireRequest):
    model: str | None = Field(None, description="Which model writes down what is heard. Default: the first that can.")
    language: str | None = None
    prompt: str | None = None
    languages: Annotated[Any, only([], reason="one language at most: use language")] = None
    keywords: Annotated[Any, only([], reason="is not supported: put the words into prompt")] = None
    delay: Annotated[Any, only(reason="is not supported: words are told as soon as they are certain")] = None


class TurnDetection(WireRequest):
    type: Annotated[Literal["server_vad"], Field(description=NO_DETECTOR)] = "server_vad"
    threshold: float = Field(0.5, ge=0, le=1)
    prefix_padding_ms: int = Field(300, ge=0, le=5_000)
    silence_duration_ms: int = Field(500, ge=50, le=30_000)
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: Annotated[Any, only(reason="is not supported")] = None

    @property
    def turns(self) -> Turns:
        return Turns(threshold=self.threshold, prefix_ms=self.prefix_padding_ms, silence_ms=self.silence_duration_ms)


class AudioInput(WireRequest):
    format: AudioFormat = AudioFormat()
    transcription: InputTranscription | None = InputTranscription()
    turn_detection: TurnDetection | None = TurnDetection()
    noise_reduction: Annotated[Any, only(reason="is not supported: only null")] = None


class AudioOutput(WireRequest):
    format: AudioFormat = AudioFormat()
    voice: str | None = None
    speed: float = Field(1.0, ge=0.25, le=4, description="OpenAI's own ends at 1.5.")
    model: str | None = Field(None, description="Extension: which model speaks. Default: the first that can.")


class SessionAudio(WireRequest):
    input: AudioInput = AudioInput()
    output: AudioOutput = AudioOutput()


class Session(WireRequest):
    """`model` answers: a chat model, or one that speaks, which then says the newest text as it is."""

    type: Literal["realtime", "transcription"]
    model: str | None = None
    audio: SessionAudio = SessionAudio()
    instructions: str = ""
    output_modalities: list[Literal["audio", "text"]] = Field(["audio"], min_length=1, max_length=1)
    max_output_tokens: Annotated[int, Field(ge=1)] | Literal["inf"] = "inf"
    temperature: float = Field(0.8, ge=0, le=2, description="Of the protocol's beta; 0: the likeliest token, always.")
    include: Annotated[Any, only([], reason="logprobs are not supported")] = None
    tools: Annotated[Any, only([], reason="tools are not supported in a session")] = None
    tool_choice: Annotated[Any, only("auto", "none", reason="tools are not supported in a session")] = None
    parallel_tool_calls: Annotated[Any, only(True, False)] = None
    reasoning: Annotated[Any, only()] = None
    prompt: Annotated[Any, only()] = None
    tracing: Annotated[Any, only()] = None
    truncation: Annotated[Any, only("auto", "disabled")] = None

    @property
    def object(self) -> str:
        return "realtime.transcription_session" if self.type == "transcription" else "realtime.session"

    @property
    def listen(self) -> Listen:
        transcription = self.audio.input.transcription or InputTranscription()
        detection = self.audio.input.turn_detection
        return Listen(
            language=transcription.language,
            prompt=transcription.prompt or "",
            turns=detection.turns if detection is not None else None,
        )

    @classmethod
    def open(cls, type: Literal["realtime", "transcription"], model: str | None) -> Session:
        if type == "realtime":
            return cls(type=type, model=model)
        return cls(type=type, audio=SessionAudio(input=AudioInput(transcription=InputTranscription(model=model))))

    def patch(self, change: Any) -> Session:
        """This session with what `change` says; what it leaves out stays. Raises `InvalidRequest`."""
        current = self.model_dump(exclude_none=False)
        wanted = merge(current, modernize(change)) if isinstance(change, dict) else change
        try:
            return Session.model_validate(wanted)
        except ValidationError as error:
            complaint = explain_validation(error)
            complaint.param = f"session.{complaint.param}" if complaint.param else "session"
            raise complaint from None

    def echo(self) -> dict[str, Any]:
        """The effective configuration. A transcription session has no voice."""
        wire = self.model_dump()
        for name in ("include", "reasoning", "prompt", "tracing", "truncation", "parallel_tool_calls"):
            if wire[name] is None:
                del wire[name]
        formats = [wire["audio"]["input"]["format"], wire["audio"]["output"]["format"]]
        for format in formats:
            format["rate"] = RATES[format["type"]]
        if self.type == "transcription":
            return {"type": self.type, "audio": {"input": wire["audio"]["input"]}}
        return wire


def merge(current: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Objects are merged field by field, all else is replaced; an object of another `type` begins anew."""
    merged = dict(current)
    for name, value in change.items():
        before = current.get(name)
        both = isinstance(before, dict) and isinstance(value, dict)
        if both and value.get("type", before.get("type")) == before.get("type"):
            value = merge(before, value)
        merged[name] = value
    return merged


FLAT_FORMATS = {"pcm16": "audio/pcm", "g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}
FLAT = {
    "input_audio_format": ("input", "format"),
    "input_audio_transcription": ("input", "transcription"),
    "input_audio_noise_reduction": ("input", "noise_reduction"),
    "turn_detection": ("input", "turn_detection"),
    "output_audio_format": ("output", "format"),
    "voice": ("output", "voice"),
    "speed": ("output", "speed"),
}
"""Where the fields of the protocol's beta are now."""


def modernize(session: dict[str, Any]) -> dict[str, Any]:
    """A session whose flat names, of the beta, are put where they belong."""
    wire = {name: value for name, value in session.items() if name not in FLAT and name != "modalities"}
    for name, (side, field) in FLAT.items():
        if name in session:
            value = session[name]
            if field == "format" and isinstance(value, str):
                value = {"type": FLAT_FORMATS.get(value, value)}
            moved = {"audio": {side: {field: value}}}
            wire = merge(moved, wire) if isinstance(wire.get("audio", {}), dict) else wire
    if "modalities" in session:
        wire.setdefault("output_modalities", ["audio"] if "audio" in (session["modalities"] or ()) else ["text"])
    return wire


class Content(WireRequest):
    type: Literal["input_text", "input_audio", "output_text", "output_audio", "text", "audio"]
    text: str | None = None
    transcript: str | None = None
    audio: Annotated[Any, only(reason="is not supported: append sound to the input buffer")] = None


class MessageItem(WireRequest):
    type: Annotated[Literal["message"], Field(description="Calls of tools are not supported.")] = "message"
    role: Literal["user", "assistant", "system"]
    content: list[Content] = Field(min_length=1)
    id: str | None = Field(None, min_length=1, max_length=100)
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text or part.transcript or "" for part in self.content)

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        if not self.text.strip():
            raise ValueError("the content has no text")
        return self


class ResponseAudioOutput(WireRequest):
    format: AudioFormat | None = None
    voice: str | None = None


class ResponseAudio(WireRequest):
    output: ResponseAudioOutput = ResponseAudioOutput()


class ResponseRequest(WireRequest):
    """What one answer does otherwise than the session says."""

    conversation: Literal["auto", "none"] = "auto"
    input: list[MessageItem] | None = None
    instructions: str | None = None
    output_modalities: list[Literal["audio", "text"]] | None = Field(None, min_length=1, max_length=1)
    audio: ResponseAudio = ResponseAudio()
    max_output_tokens: Annotated[int, Field(ge=1)] | Literal["inf"] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    metadata: dict[str, str] | None = Field(None, max_length=16)
    tools: Annotated[Any, only([], reason="tools are not supported in a session")] = None
    tool_choice: Annotated[Any, only("auto", "none", reason="tools are not supported in a session")] = None
    parallel_tool_calls: Annotated[Any, only(True, False)] = None
    reasoning: Annotated[Any, only()] = None
    prompt: Annotated[Any, only()] = None


class ClientEvent(WireRequest):
    """What a client sends. `event_id` comes back in the error that the event causes, if it does."""

    type: str
    event_id: str | None = None


class SessionUpdate(ClientEvent):
    session: dict[str, Any]


class Append(ClientEvent):
    audio: str


class ItemCreate(ClientEvent):
    item: MessageItem
    previous_item_id: str | None = None


class ItemReference(ClientEvent):
    item_id: str


class ItemTruncate(ItemReference):
    content_index: Literal[0]
    audio_end_ms: int


class ResponseCreate(ClientEvent):
    response: ResponseRequest = ResponseRequest()


class ResponseCancel(ClientEvent):
    response_id: str | None = None
