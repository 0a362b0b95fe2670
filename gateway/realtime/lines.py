"""`/v1/audio/stream`: raw sound in, lines of JSON out, for those who want no protocol.

As a socket: binary frames of sound; a text frame "commit" ends an utterance by hand, "end" the whole; each line is a
text frame. As a POST: the body is the sound, streamed or not, and the answer is streamed back while it still arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.datastructures import QueryParams

from polymux.core.errors import InvalidRequest, PolymuxError
from polymux.core.tasks import Committed, Listen, SpeechStarted, SpeechStopped, TextDelta, Turns, Understood
from polymux.gateway.call import Call
from polymux.gateway.errors import describe_error
from polymux.gateway.realtime.audio import Ear, Format
from polymux.gateway.realtime.hearing import Hearing
from polymux.gateway.realtime.models import Models
from polymux.gateway.state import Gateway

NAMES: dict[str, Format] = {"s16le": "audio/pcm", "mulaw": "audio/pcmu", "alaw": "audio/pcma"}
KNOWN = ("model", "format", "rate", "language", "prompt", "threshold", "silence_ms", "prefix_ms")


class LineStream:
    """One stream: `feed` it bytes, `finish` it, and read `lines` meanwhile."""

    def __init__(self, gateway: Gateway, query: QueryParams, request_id: str) -> None:
        """Raises `PolymuxError` for a parameter that is unknown or wrong."""
        for name in query:
            if name not in KNOWN:
                raise InvalidRequest(f"{name[:80]!r} is not a parameter here", param=name, code="unsupported_parameter")
        format = NAMES.get(query.get("format", "s16le"))
        if format is None:
            raise InvalidRequest(f"format must be one of {', '.join(NAMES)}", param="format", code="invalid_value")
        rate = read_number(query, "rate", 16_000 if format == "audio/pcm" else 8_000, 8_000, 192_000)
        turns = Turns(
            threshold=read_number(query, "threshold", 0.5, 0, 1),
            prefix_ms=int(read_number(query, "prefix_ms", 300, 0, 5_000)),
            silence_ms=int(read_number(query, "silence_ms", 500, 50, 30_000)),
        )
        ask = Listen(language=query.get("language"), prompt=query.get("prompt", ""), turns=turns)
        model = Models(gateway).find_listener(query.get("model"))
        call = Call(gateway, model, "listen", ask, weight=1, request_id=request_id)
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._failed: PolymuxError | None = None
        self.hearing = Hearing(call, Ear(format, int(rate)), self._tell, self._fail)

    async def open(self) -> None:
        """Raises `PolymuxError` when the job cannot be opened: nothing was answered yet."""
        await self.hearing.open()
        if self._failed is not None:
            raise self._failed

    async def feed(self, data: bytes) -> None:
        await self.hearing.hear(data)

    async def finish(self) -> None:
        """No more sound: what is being said is complete."""
        self.hearing.commit()
        await self.hearing.leave()
        self._lines.put_nowait(None)

    async def lines(self) -> AsyncIterator[bytes]:
        while (line := await self._lines.get()) is not None:
            yield line

    async def leave(self) -> None:
        """The client is gone: stop at once, and end the lines."""
        await self.hearing.close()
        self._lines.put_nowait(None)

    async def close(self) -> None:
        await self.hearing.close()

    async def _tell(self, answer: msgspec.Struct) -> None:
        line = describe(answer)
        if line is not None:
            self._lines.put_nowait(msgspec.json.encode(line) + b"\n")

    async def _fail(self, error: PolymuxError) -> None:
        self._failed = error
        self._lines.put_nowait(msgspec.json.encode({"type": "error", **describe_error(error)}) + b"\n")
        self._lines.put_nowait(None)


def describe(answer: msgspec.Struct) -> dict[str, Any] | None:
    """One line, or None for what only concerns us. Times are seconds of all the sound."""
    match answer:
        case SpeechStarted(index=index, seconds=seconds):
            return {"type": "start", "utterance": index, "time": round(seconds, 3)}
        case SpeechStopped(index=index, seconds=seconds):
            return {"type": "stop", "utterance": index, "time": round(seconds, 3)}
        case TextDelta(index=index, text=text):
            return {"type": "delta", "utterance": index, "text": text}
        case Understood(index=index, text=text, seconds=seconds):
            return {"type": "final", "utterance": index, "text": text, "seconds": round(seconds, 3)}
        case Committed():
            return None
    return None


def read_number(query: QueryParams, name: str, default: float, low: float, high: float) -> float:
    """Raises `InvalidRequest`, also for NaN."""
    text = query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be a number from {low:g} to {high:g}", param=name, code="invalid_value")
    return value
