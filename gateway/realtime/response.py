"""One answer on a socket: a chat model writes it, a voice says it sentence by sentence, and both can be stopped.

The three models of the voice loop know nothing of each other: each is asked through the service, like over HTTP.
"""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from polymux.core.errors import InvalidRequest, PolymuxError
from polymux.core.tasks import (
    Chat,
    ChoiceEnded,
    Done,
    Sampling,
    Sound,
    Speak,
    SpokenWord,
    TextDelta,
    Tokenize,
    Tokenized,
)
from polymux.core.text.sentences import split_sentences
from polymux.core.vocabulary import Usage
from polymux.gateway.call import Call
from polymux.gateway.errors import ClientLeft, wrap_unexpected
from polymux.gateway.ids import draw_id
from polymux.gateway.realtime.audio import Mouth
from polymux.gateway.realtime.conversation import Conversation, Item, read_messages
from polymux.gateway.realtime.plan import Plan
from polymux.gateway.realtime.timeline import Timeline

PIECE = 24_000
"""Bytes of sound in one event, at most: clients take messages of a mebibyte."""

TOKEN_MS = 50
"""Of spoken sound in one audio token, as OpenAI counts."""

Send = Callable[..., Awaitable[None]]
OpenCall = Callable[[str, str, msgspec.Struct], Call]


class Response:
    """`run` tells all of it, whatever happens, and returns."""

    def __init__(self, plan: Plan, conversation: Conversation, send: Send, open_call: OpenCall) -> None:
        self.id = f"resp_{draw_id()}"
        self.item = Item("assistant", "output_text" if plan.mouth is None else "output_audio", status="in_progress")
        self._plan = plan
        self._conversation = conversation
        self._send = send
        self._open_call = open_call
        self._status: dict[str, Any] = {"status": "in_progress", "status_details": None}
        self._usage: Usage | None = None
        self._ask: Chat | None = None
        self._written = ""
        self._heard_ms = 0.0
        """Sound that was sent."""
        self._stopped: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._begun = self._ending = False
        self._where = {"response_id": self.id, "item_id": self.item.id, "output_index": 0, "content_index": 0}

    def stop(self, reason: str) -> None:
        """End early: turn_detected or client_cancelled."""
        if self._stopped is None and not self._ending and self._task is not None:
            self._stopped = reason
            self._task.cancel()

    @property
    def stopped(self) -> bool:
        return self._stopped is not None

    async def run(self) -> None:
        self._task = asyncio.current_task()
        await self._send("response.created", response=self._show([]))
        try:
            await self._answer()
            if self._status["status"] == "in_progress":
                self._status = {"status": "completed", "status_details": {"type": "completed"}}
        except asyncio.CancelledError:
            if self._stopped is None or self._task is None or self._task.uncancel():
                raise
            self._status = {"status": "cancelled", "status_details": {"type": "cancelled", "reason": self._stopped}}
        except ClientLeft:
            raise
        except Exception as error:
            self._fail(error if isinstance(error, PolymuxError) else wrap_unexpected(error))
        self._ending = True
        if self._usage is None and self._ask is not None:
            self._usage = await self._count(self._ask)
        await self._finish()

    async def _answer(self) -> None:
        for item in self._plan.context:
            if item.heard is not None:
                await item.heard.wait()
        await self._begin()
        if self._plan.mouth is None:
            async for text in self._write():
                self.item.text += text
                await self._send("response.output_text.delta", delta=text, **self._where)
            return
        sentences: asyncio.Queue[str | None] = asyncio.Queue()
        writing = asyncio.create_task(self._write_sentences(sentences))
        try:
            while (sentence := await sentences.get()) is not None:
                await self._say(sentence, self._plan.mouth)
            await writing
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    # ---- text ----

    async def _write(self) -> Any:
        if self._plan.chat is None:
            texts = [item.text for item in self._plan.context if item.text]
            if not texts:
                raise InvalidRequest("there is no text to say", code="empty_conversation")
            yield texts[-1]
            return
        messages = read_messages(self._plan.context, self._plan.instructions)
        if not any(message["role"] != "system" for message in messages):
            raise InvalidRequest("there is nothing to answer: the conversation is empty", code="empty_conversation")
        sampling = Sampling(temperature=self._plan.temperature)
        self._ask = Chat(messages=messages, max_tokens=self._plan.max_tokens, sampling=sampling)
        call = self._open_call(self._plan.chat, "chat", self._ask)
        async with call.answers() as answers:
            async for answer in answers:
                if isinstance(answer, TextDelta):
                    self._written += answer.text
                    yield answer.text
                elif isinstance(answer, ChoiceEnded) and answer.reason == "length":
                    details = {"type": "incomplete", "reason": "max_output_tokens"}
                    self._status = {"status": "incomplete", "status_details": details}
                elif isinstance(answer, Done):
                    self._usage = answer.usage

    async def _write_sentences(self, sentences: asyncio.Queue[str | None]) -> None:
        """Sentences as soon as each is certain, then None, also where writing fails."""
        held = ""
        try:
            async for text in self._write():
                *complete, held = split_sentences(held + text) or [""]
                for sentence in complete:
                    sentences.put_nowait(sentence)
            if held:
                sentences.put_nowait(held)
        finally:
            sentences.put_nowait(None)

    # ---- sound ----

    async def _say(self, sentence: str, mouth: Mouth) -> None:
        """One sentence: its words as they are said where the voice knows when, else all of it before its sound."""
        timeline = self.item.timeline
        assert timeline is not None and self._plan.speech is not None
        begin = timeline.milliseconds
        told = ""
        stretch = None
        ask = Speak(text=sentence, voice=self._plan.voice, speed=self._plan.speed)
        try:
            async with self._open_call(self._plan.speech, "speak", ask).answers() as answers:
                async for answer in answers:
                    if not isinstance(answer, Sound):
                        continue
                    words = "".join(word.text for word in answer.words)
                    if words and stretch is None and sentence.startswith(told + words):
                        told += words
                        await self._tell_words(answer.words, begin)
                    elif not told:
                        told = sentence
                        stretch = timeline.stretch(sentence)
                        await self._tell(sentence)
                    await self._sound(mouth.say(answer), mouth)
                    if stretch is not None:
                        stretch.end = timeline.milliseconds
        except InvalidRequest as error:
            if error.param != "input":
                raise  # else this sentence has no sound: a smile, a rule
        await self._sound(mouth.finish(), mouth)
        if rest := sentence[len(told) :]:
            timeline.add(rest, timeline.milliseconds, timeline.milliseconds)
            await self._tell(rest)

    async def _tell_words(self, words: Sequence[SpokenWord], begin: float) -> None:
        """Words with their places in the whole answer's sound: an extension of the event, in seconds."""
        times = [(begin + word.start * 1000, begin + word.end * 1000) for word in words]
        for word, (start, end) in zip(words, times):
            self.item.timeline.add(word.text, start, end)  # type: ignore[union-attr]
        shown = [
            {"word": word.text.strip(), "start": round(start / 1000, 3), "end": round(end / 1000, 3)}
            for word, (start, end) in zip(words, times)
        ]
        await self._tell("".join(word.text for word in words), words=shown)

    async def _tell(self, text: str, **more: Any) -> None:
        self.item.text += text
        await self._send("response.output_audio_transcript.delta", delta=text, **self._where, **more)

    async def _sound(self, data: bytes, mouth: Mouth) -> None:
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            milliseconds = mouth.measure(piece)
            self._heard_ms += milliseconds
            if self.item.timeline is not None:
                self.item.timeline.lengthen(milliseconds)
            await self._send("response.output_audio.delta", delta=base64.b64encode(piece).decode(), **self._where)

    # ---- the frame around it ----

    async def _begin(self) -> None:
        self._begun = True
        if self._plan.mouth is not None:
            self.item.timeline = Timeline()
        previous = self._conversation.add(self.item) if self._plan.kept else None
        empty = {**self.item.show(), "content": []}
        await self._send("response.output_item.added", response_id=self.id, output_index=0, item=empty)
        if self._plan.kept:
            await self._send("conversation.item.added", item=empty, previous_item_id=previous)
        await self._send("response.content_part.added", part=self._part(), **self._where)

    async def _finish(self) -> None:
        """Everything that was begun is done, also after a failure or an interruption."""
        if self._begun:
            self.item.status = "completed" if self._status["status"] == "completed" else "incomplete"
            if self._plan.mouth is None:
                await self._send("response.output_text.done", text=self.item.text, **self._where)
            else:
                await self._send("response.output_audio.done", **self._where)
                await self._send("response.output_audio_transcript.done", transcript=self.item.text, **self._where)
            await self._send("response.content_part.done", part=self._part(), **self._where)
            await self._send("response.output_item.done", response_id=self.id, output_index=0, item=self.item.show())
            if self._plan.kept:
                await self._send("conversation.item.done", item=self.item.show(), previous_item_id=None)
        await self._send("response.done", response=self._show([self.item.show()] if self._begun else []))

    def _part(self) -> dict[str, str]:
        if self._plan.mouth is None:
            return {"type": "text", "text": self.item.text}
        return {"type": "audio", "transcript": self.item.text}

    async def _count(self, ask: Chat) -> Usage:
        """What an answer cost until it was ended early, for which no model told: tokens that were read and written."""
        return Usage(
            await self._count_tokens(Tokenize(chat=ask)),
            await self._count_tokens(Tokenize(text=self._written, special=False)) if self._written else 0,
        )

    async def _count_tokens(self, ask: Tokenize) -> int:
        """0 for a model that does not spell texts."""
        count = 0
        try:
            async with self._open_call(self._plan.chat or "", "tokenize", ask).answers() as answers:
                async for answer in answers:
                    count += len(answer.ids) if isinstance(answer, Tokenized) else 0
        except PolymuxError:
            return 0
        return count

    def _fail(self, error: PolymuxError) -> None:
        told = {"type": error.type, "code": error.code, "message": error.message}
        self._status = {"status": "failed", "status_details": {"type": "failed", "error": told}}

    def _show(self, output: list[dict[str, Any]]) -> dict[str, Any]:
        usage = self._usage or Usage()
        spoken = math.ceil(self._heard_ms / TOKEN_MS)
        return {
            "id": self.id,
            "object": "realtime.response",
            "conversation_id": self._conversation.id if self._plan.kept else None,
            "output_modalities": ["text"] if self._plan.mouth is None else ["audio"],
            "metadata": self._plan.metadata,
            "output": output,
            "usage": {
                "input_tokens": usage.input_tokens,
                "output_tokens": usage.output_tokens + spoken,
                "total_tokens": usage.input_tokens + usage.output_tokens + spoken,
                "input_token_details": {"text_tokens": usage.input_tokens, "cached_tokens": usage.cached_tokens},
                "output_token_details": {"text_tokens": usage.output_tokens, "audio_tokens": spoken},
            },
            **self._status,
        }
