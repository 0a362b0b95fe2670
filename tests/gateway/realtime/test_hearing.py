"""A socket's listening end: who leaves while answers come is missed quietly."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from polymux.core.errors import NotReady
from polymux.gateway.errors import ClientLeft
from polymux.gateway.realtime.audio import Ear
from polymux.gateway.realtime.hearing import Hearing

pytestmark = pytest.mark.anyio


class Heard(msgspec.Struct):
    """An answer."""


class Call:
    """Answers once, or fails."""

    request_id = "r"
    opened = None

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    @asynccontextmanager
    async def answers(self) -> AsyncIterator[AsyncIterator[Heard]]:
        async def listen() -> AsyncIterator[Heard]:
            if self.fails:
                raise NotReady("not yet")
            yield Heard()

        yield listen()


@pytest.mark.parametrize("fails", [False, True])
async def test_who_leaves_while_answers_come_is_missed_quietly(fails: bool) -> None:
    """Also where nobody closes it: a socket may have gone on to the next one. An exception that nobody asks for would
    stand in the log as a failure of the server."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))

    async def tell(told: Any) -> None:
        raise ClientLeft

    hearing = Hearing(Call(fails), Ear("audio/pcm"), tell, tell)  # type: ignore[arg-type]
    await hearing.open()
    while not hearing.over:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    del hearing
    gc.collect()
    assert complaints == []
