"""What the listening job tells becomes the protocol's events, and items of the conversation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from polymux.core.errors import InvalidRequest, PolymuxError
from polymux.core.tasks import (
    Cleared,
    Committed,
    SpeechStarted,
    SpeechStopped,
    TextDelta,
    Uncommitted,
    Understood,
)
from polymux.gateway.realtime.conversation import Conversation, Item

Send = Callable[..., Awaitable[None]]


class EmptyCommit(InvalidRequest):
    code = "input_audio_buffer_commit_empty"


class Transcript:
    """Of one listening job. `on_speech` and `on_text` are told when somebody begins to speak, and what was said."""

    def __init__(
        self,
        conversation: Conversation,
        send: Send,
        fail: Callable[[PolymuxError, str | None], Awaitable[None]],
        on_speech: Callable[[], None],
        on_text: Callable[[Item], Awaitable[None]],
    ) -> None:
        """`fail` is given an error and the id of the client's event that caused it."""
        self.commits: deque[str | None] = deque()
        """Ids of the client's commits that are not answered yet."""
        self.shown = True
        """Whether the client wants to see what was said."""
        self._conversation = conversation
        self._send = send
        self._fail = fail
        self._on_speech = on_speech
        self._on_text = on_text
        self._items: dict[int, Item] = {}

    async def tell(self, answer: msgspec.Struct) -> None:
        match answer:
            case SpeechStarted(index=index, seconds=seconds):
                self._on_speech()
                item = self._find(index)
                start = round(seconds * 1000)
                await self._send("input_audio_buffer.speech_started", audio_start_ms=start, item_id=item.id)
            case SpeechStopped(index=index, seconds=seconds):
                item = self._find(index)
                end = round(seconds * 1000)
                await self._send("input_audio_buffer.speech_stopped", audio_end_ms=end, item_id=item.id)
            case Committed(index=index, asked=asked):
                if asked:
                    self.commits.popleft()
                await self._commit(self._find(index))
            case Uncommitted(seconds=seconds):
                await self._fail(refuse_commit(seconds), self.commits.popleft())
            case Cleared():
                await self._send("input_audio_buffer.cleared")
            case TextDelta(index=index, text=text):
                await self._transcribed("delta", self._find(index), delta=text)
            case Understood(index=index, text=text, seconds=seconds):
                item = self._items.pop(index, None) or Item("user", "input_audio")
                item.text = text
                usage = {"type": "duration", "seconds": round(seconds, 3)}
                await self._transcribed("completed", item, transcript=text, usage=usage)
                if item.heard is not None:
                    item.heard.set()
                await self._on_text(item)

    async def break_off(self, error: PolymuxError) -> None:
        """The job is gone: what was committed will never be written down."""
        told = {"type": error.type, "code": error.code, "message": error.message, "param": error.param}
        for item in self._items.values():
            if item.heard is not None:
                await self._transcribed("failed", item, error=told)
                item.heard.set()
        self._items.clear()

    def _find(self, index: int) -> Item:
        item = self._items.get(index)
        if item is None:
            item = self._items[index] = Item("user", "input_audio")
        return item

    async def _commit(self, item: Item) -> None:
        item.heard = asyncio.Event()
        previous = self._conversation.add(item)
        await self._send("input_audio_buffer.committed", item_id=item.id, previous_item_id=previous)
        shown = item.show()
        await self._send("conversation.item.added", item=shown, previous_item_id=previous)
        await self._send("conversation.item.done", item=shown, previous_item_id=previous)

    async def _transcribed(self, what: str, item: Item, **fields: object) -> None:
        if self.shown:
            type = f"conversation.item.input_audio_transcription.{what}"
            await self._send(type, item_id=item.id, content_index=0, **fields)


def refuse_commit(seconds: float) -> EmptyCommit:
    return EmptyCommit(
        f"the input audio buffer is too small to be committed: {seconds * 1000:.0f} ms of sound that belong to no "
        "utterance yet; 100 ms are needed"
    )
