"""What `POST /v1/messages` answers: a message of blocks, and the events by which it grows."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from polymux.core.vocabulary import Usage
from polymux.gateway.schemas.base import WireAnswer, maybe
from polymux.gateway.schemas.usage import ReceiptBody


class TextOut(WireAnswer):
    type: Literal["text"] = "text"
    text: str = ""
    citations: None = None


class ThinkingOut(WireAnswer):
    type: Literal["thinking"] = "thinking"
    thinking: str = ""
    signature: str = ""


class ToolUseOut(WireAnswer):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any] = Field(default_factory=dict)


BlockOut = TextOut | ThinkingOut | ToolUseOut


class MessageUsage(WireAnswer):
    """Tokens that a cache answered are counted apart from the others."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> MessageUsage:
        return cls(
            input_tokens=usage.input_tokens - usage.cached_tokens,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
        )


class MessageBody(WireAnswer):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[BlockOut] = Field(default_factory=list)
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    receipt: ReceiptBody | None = maybe("Extension. Where the time went.")


class MessageEvent(WireAnswer):
    """A frame of the stream. `type` says which of the other fields there are."""

    model_config = ConfigDict(extra="allow")

    type: str


class CountAnswer(WireAnswer):
    input_tokens: int
