"""Frames are read ahead of the work they make: who leaves is missed at once, and a flood holds up nobody else."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from polymux.gateway.realtime import inbox as module
from polymux.gateway.realtime.inbox import Inbox

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Client:
    """The receiving end of a socket: so many frames at once, then it stays or leaves."""

    def __init__(self, *texts: str, leaves: bool = False) -> None:
        self.messages = [{"type": "websocket.receive", "text": text} for text in texts]
        self.leaves = leaves

    async def receive(self) -> dict[str, Any]:
        if self.messages:
            return self.messages.pop(0)
        if not self.leaves:
            await asyncio.Event().wait()
        return {"type": "websocket.disconnect"}


async def test_work_stops_where_it_is_when_the_client_leaves():
    stopped = False

    async def hang() -> None:
        nonlocal stopped
        try:
            await asyncio.Event().wait()
        finally:
            stopped = True

    await Inbox(Client("one", "two", leaves=True)).serve(hang())  # type: ignore[arg-type]
    assert stopped


async def test_no_more_is_read_than_may_wait(monkeypatch):
    monkeypatch.setattr(module, "MOST_WAITING", 10)
    client = Client(*["eight by" for _ in range(6)])
    inbox = Inbox(client)  # type: ignore[arg-type]

    async def take_all() -> None:
        await asyncio.sleep(0.01)
        assert len(client.messages) == 4, "two frames are more than ten characters"
        for _ in range(6):
            assert (await inbox.take())["text"] == "eight by"

    await inbox.serve(take_all())


async def test_what_the_work_raises_is_raised():
    async def fail() -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        await Inbox(Client()).serve(fail())  # type: ignore[arg-type]


async def test_a_flood_of_frames_holds_up_nobody():
    """Twenty thousand frames that are there already: others have their turns in between."""
    turns = 0

    async def live() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    inbox = Inbox(Client(*["x"] * 20_000, leaves=True))  # type: ignore[arg-type]
    living = asyncio.create_task(live())

    async def idle() -> None:
        while True:
            await inbox.take()

    began = time.thread_time()
    await inbox.serve(idle())
    living.cancel()
    assert turns > (time.thread_time() - began) / 0.05
