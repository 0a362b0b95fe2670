"""A client's frames, read ahead of whoever carries them out: that the client has left is noticed at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any

from starlette.types import Message
from starlette.websockets import WebSocket

from polymux.gateway.turn import Turn

MOST_WAITING = 32 * 2**20
"""Characters or bytes of frames that wait to be carried out; with more, the connection is read no further."""


class Inbox:
    """Frames in order. `serve` reads them for as long as the client stays."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self._frames: deque[Message] = deque()
        self._waiting = 0
        self._changed = asyncio.Event()

    async def serve(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`, which takes the frames; returns when the client has left, wherever `work` is then. What `work`
        raises is raised."""
        working = asyncio.create_task(work)
        reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait([working, reading], return_when=asyncio.FIRST_COMPLETED)
            for task in (working, reading):
                if task.done():
                    task.result()
        finally:
            working.cancel()
            reading.cancel()
            await asyncio.gather(working, reading, return_exceptions=True)

    async def take(self) -> Message:
        """The next frame."""
        while not self._frames:
            await self._wait()
        frame = self._frames.popleft()
        self._waiting -= measure(frame)
        self._changed.set()
        return frame

    async def _read(self) -> None:
        turn = Turn()
        while (frame := await self._websocket.receive())["type"] != "websocket.disconnect":
            self._frames.append(frame)
            self._waiting += measure(frame)
            self._changed.set()
            while self._waiting > MOST_WAITING:
                await self._wait()
            await turn.pass_on()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def measure(frame: Message) -> int:
    return len(frame.get("text") or frame.get("bytes") or b"")
