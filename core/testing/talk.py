"""A client of `/v1/realtime` that may send anything: events as dictionaries."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import websockets


class Talk:
    """One socket."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.sound = b""

    async def send(self, type: str, **fields: Any) -> None:
        await self.connection.send(json.dumps({"type": type, **fields}))

    async def until(self, type: str) -> dict[str, Any]:
        """The next event of that type; sound on the way is kept. Raises `RuntimeError` for an error in between."""
        while True:
            event: dict[str, Any] = json.loads(await self.connection.recv())
            if event["type"] == "response.output_audio.delta":
                self.sound += base64.b64decode(event["delta"])
            if event["type"] == type:
                return event
            if event["type"] == "error":
                raise RuntimeError(event)

    async def ask(self, text: str) -> None:
        content = [{"type": "input_text", "text": text}]
        await self.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        await self.send("response.create")

    async def hear(self, data: bytes, size: int) -> None:
        """Sound in pieces of so many bytes, whole samples or not."""
        for start in range(0, len(data), size):
            audio = base64.b64encode(data[start : start + size]).decode()
            await self.send("input_audio_buffer.append", audio=audio)


@asynccontextmanager
async def open_talk(url: str, query: str) -> AsyncIterator[Talk]:
    """`url`: of the server; `query`: what follows the question mark."""
    address = f"{url.replace('http', 'ws', 1)}/v1/realtime?{query}"
    async with websockets.connect(address, max_size=None, open_timeout=None) as connection:
        talk = Talk(connection)
        await talk.until("session.created")
        yield talk
