"""A service of three fakes: an ear that hears loudness, a chat model that says two sentences, a voice that hums."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import openai
import pytest

from polymux.core.errors import InvalidRequest
from polymux.core.tasks import (
    ChoiceEnded,
    Clear,
    Cleared,
    Commit,
    Committed,
    Done,
    Hear,
    Leave,
    Listen,
    Listened,
    Sound,
    SpeechStarted,
    SpeechStopped,
    SpokenWord,
    TextDelta,
    Tokenized,
    Uncommitted,
    Understood,
)
from polymux.core.testing.service import FakeServed, FakeService
from polymux.core.vocabulary import Receipt, Usage

RATE = 16_000
DONE = Done(Usage(input_tokens=3, output_tokens=5), Receipt())
REPLY = ["Good", " morning", ".", " How are", " you?"]


async def hear(ask: Any, inbox: asyncio.Queue) -> AsyncIterator[Any]:
    """Loud sound is speech. Every utterance says how long it was; "!" is told at once, the rest at its end."""
    heard = length = index = 0
    speaking = False

    def finish(asked: bool) -> list[Any]:
        seconds = length / RATE
        text = f"{seconds:.1f} seconds"
        return [
            Committed(index, seconds, asked),
            TextDelta(index, text),
            Understood(index, f"! {text}" if speaking else text, seconds),
        ]

    while not isinstance(message := await inbox.get(), Leave):
        if isinstance(message, Listen):
            if message.language == "xx":
                raise InvalidRequest("language 'xx' is not one that this model knows", param="language")
            ask = message
        elif isinstance(message, Clear):
            length, speaking = 0, False
            yield Cleared()
        elif isinstance(message, Commit):
            if length < RATE // 10:
                yield Uncommitted(length / RATE)
                continue
            for answer in finish(True):
                yield answer
            length, index, speaking = 0, index + 1, False
        elif isinstance(message, Hear):
            heard += len(message.samples)
            loud = bool(np.abs(message.samples).mean() > 0.05)
            if ask.turns is None or speaking or loud:
                length += len(message.samples)
            if ask.turns is not None and loud and not speaking:
                speaking = True
                yield SpeechStarted(index, (heard - len(message.samples)) / RATE)
                yield TextDelta(index, "! ")
            elif ask.turns is not None and speaking and not loud:
                yield SpeechStopped(index, heard / RATE)
                for answer in finish(False):
                    yield answer
                length, index, speaking = 0, index + 1, False
            yield Listened(heard / RATE)
    yield DONE


async def speak(served: FakeServed, task: str, ask: Any) -> AsyncIterator[Any]:
    """Chat: two sentences. Voice: 100 ms of sound for every word; at speed 1.5 without the times of words."""
    if task == "tokenize":  # a conversation has 17 tokens, a text one for each letter
        yield Tokenized(list(range(17 if ask.chat else len(ask.text))), [], 0)
    elif task == "chat":
        for text in REPLY:
            await asyncio.sleep(0.05 if served.name == "slow chat" else 0)
            yield TextDelta(0, text)
        yield ChoiceEnded(0, "length" if ask.max_tokens == 1 else "stop")
    else:
        words = ask.text.split(" ")
        texts = [f"{word} " for word in words[:-1]] + words[-1:]
        for place, text in enumerate(text for text in texts if text):
            if served.name == "slow":
                await asyncio.sleep(0.05)
            times = [SpokenWord(text, place / 10, (place + 1) / 10)]
            yield Sound(b"\1\2" * 2400, 24_000, [] if ask.speed == 1.5 else times)
    yield DONE


@pytest.fixture
def fake() -> FakeService:
    models = (
        FakeServed("chat", ("chat",)),
        FakeServed("slow chat", ("chat", "tokenize")),
        FakeServed("ear", ("listen",)),
        FakeServed("voice", ("speak",)),
        FakeServed("slow", ("speak",)),
    )
    return FakeService(models=models, script=speak, ear=hear)


class Talk:
    """A connection of the official client, and everything it has received."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.events: list[Any] = []

    async def until(self, type: str) -> Any:
        """The next event of that type; what came before it is in `events`."""
        try:
            async with asyncio.timeout(120):
                while True:
                    event = await self.connection.recv()
                    self.events.append(event)
                    if event.type == type:
                        return event
        except TimeoutError:
            raise AssertionError(f"no {type} came; {[each.to_dict() for each in self.events[-3:]]} did") from None

    async def raw(self, event: Any) -> None:
        """Anything at all, as one frame."""
        await self.connection._connection.send(event)

    async def error(self) -> Any:
        return (await self.until("error")).error

    async def append(self, seconds: float, level: float = 0.0) -> None:
        samples = np.full(int(seconds * 24_000), int(level * 32767), "<i2")
        audio = base64.b64encode(samples.tobytes()).decode()
        await self.connection.input_audio_buffer.append(audio=audio)

    def types(self) -> list[str]:
        return [event.type for event in self.events]


@pytest.fixture
def talking_live(fake, serving) -> Callable[..., Any]:
    """`async with talking_live(model="chat") as talk:`, greeted already. `settings` are the gateway's."""

    @asynccontextmanager
    async def connect(
        *, settings: dict[str, Any] | None = None, key: str = "none", **options: Any
    ) -> AsyncIterator[Talk]:
        async with serving(fake, **(settings or {})) as running:
            client = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)
            async with client, client.realtime.connect(**options) as connection:
                talk = Talk(connection)
                await talk.until("session.created")
                yield talk

    return connect
