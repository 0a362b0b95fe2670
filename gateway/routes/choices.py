"""Streams whose chunks tell of choices, and how they end: chat and completions alike."""

from __future__ import annotations

import time
from typing import Any, Generic, TypeVar

from polymux.core.tasks import Done
from polymux.gateway.answering import EventFrames, frame_model
from polymux.gateway.ids import draw_id
from polymux.gateway.schemas.chat import ChatCompletionChunk
from polymux.gateway.schemas.completions import Completion
from polymux.gateway.schemas.usage import ReceiptBody, TokenUsage

Chunk = TypeVar("Chunk", ChatCompletionChunk, Completion)


class ChoiceFrames(EventFrames, Generic[Chunk]):
    """Chunks of one kind under one id; the receipt goes into the last, usage after it if asked for.

    The latest reason is held until the next answer: the last chunk, which carries the receipt, is known only then.
    """

    def __init__(self, kind: type[Chunk], prefix: str, model: str, wants_usage: bool) -> None:
        """`prefix`: of the id."""
        self._kind = kind
        self._wants_usage = wants_usage
        self._facts: dict[str, Any] = {"id": f"{prefix}-{draw_id()}", "created": int(time.time()), "model": model}
        self._held: Chunk | None = None

    def make(self, *choices: Any) -> Chunk:
        """A chunk about these choices."""
        return self._kind(**self._facts, choices=list(choices))

    def hold(self, chunk: Chunk) -> None:
        self._held = chunk

    def release(self) -> bytes:
        """What was held: more comes after it."""
        held, self._held = self._held, None
        return frame_model(held) if held is not None else b""

    def end(self, done: Done) -> bytes:
        receipt = ReceiptBody.of(done.receipt)
        if self._held is not None and not self._wants_usage:
            self._held.receipt = receipt
            return self.release()
        frames = self.release()
        last = self.make()
        last.receipt = receipt
        if self._wants_usage:
            last.usage = TokenUsage.of(done.usage)
        return frames + frame_model(last)
