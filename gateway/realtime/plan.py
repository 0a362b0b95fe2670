"""What one answer is made of: the session's settings and the request's taken together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polymux.gateway.realtime.audio import Mouth
from polymux.gateway.realtime.conversation import Conversation, Item
from polymux.gateway.realtime.frames import read_item
from polymux.gateway.realtime.models import Models
from polymux.gateway.schemas.realtime import ResponseRequest, Session


@dataclass(frozen=True)
class Plan:
    """What an answer is made of, session and request taken together. Without a `chat` model the newest text is said
    as it is; without a `voice` model the answer is text."""

    chat: str | None
    speech: str | None
    voice: str | None
    speed: float
    mouth: Mouth | None
    instructions: str
    max_tokens: int | None
    temperature: float
    context: Sequence[Item]
    kept: bool
    """Whether the answer becomes part of the conversation."""
    metadata: dict[str, str] | None


def make_plan(session: Session, asked: ResponseRequest, conversation: Conversation, models: Models) -> Plan:
    """Raises `PolymuxError` when a model is missing."""
    output = asked.audio.output
    aloud = "audio" in (asked.output_modalities or session.output_modalities)
    limit = asked.max_output_tokens or session.max_output_tokens
    format = output.format or session.audio.output.format
    return Plan(
        chat=None if models.speaks_only(session) else models.answerer(session),
        speech=models.speaker(session) if aloud else None,
        voice=output.voice or session.audio.output.voice,
        speed=session.audio.output.speed,
        mouth=Mouth(format.type) if aloud else None,
        instructions=session.instructions if asked.instructions is None else asked.instructions,
        max_tokens=limit if isinstance(limit, int) else None,
        temperature=session.temperature if asked.temperature is None else asked.temperature,
        context=list(conversation) if asked.input is None else [read_item(item) for item in asked.input],
        kept=asked.conversation == "auto",
        metadata=asked.metadata,
    )
