"""The listening end of a socket: one long job, opened with the first sound, that tells of utterances as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import msgspec

from polymux.core.errors import PolymuxError
from polymux.core.tasks import LISTEN_RATE, Clear, Commit, Done, Hear, Leave, Listen, Listened
from polymux.gateway.call import Call
from polymux.gateway.errors import ClientLeft
from polymux.gateway.realtime.audio import Ear

AHEAD = 60.0
"""Seconds of sound that may wait for the engine; a client that sends more at once is read no further until then."""


class Hearing:
    """Sound goes in by `hear`; every answer goes to `tell`, in order, from a task of its own."""

    def __init__(
        self,
        call: Call,
        ear: Ear,
        tell: Callable[[msgspec.Struct], Awaitable[None]],
        fail: Callable[[PolymuxError], Awaitable[None]],
    ) -> None:
        """`fail` is told when the job ends by itself before `leave`."""
        self.call = call
        self.ear = ear
        self.over = False
        self._tell = tell
        self._fail = fail
        self._posted = 0
        self._listened = 0.0
        self._room = asyncio.Event()
        self._opened = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Returns once the job runs, or has failed to (then `fail` was told)."""
        self._task = asyncio.create_task(self._read(), name=f"hearing {self.call.request_id}")
        await self._opened.wait()

    async def hear(self, data: bytes) -> None:
        """Bytes of sound. Waits while the engine is too far behind."""
        samples = self.ear.hear(data)
        for start in range(0, len(samples), LISTEN_RATE):
            while self._behind > AHEAD and not self.over:
                self._room.clear()
                await self._room.wait()
            piece = samples[start : start + LISTEN_RATE]
            self._posted += len(piece)
            self._post(Hear(piece))

    def commit(self) -> None:
        self._post(Commit())

    def clear(self) -> None:
        self._post(Clear())

    async def amend(self, ask: Listen) -> None:
        """Raises `PolymuxError` for what the model cannot do; nothing is changed then."""
        if self.call.opened is not None and not self.over:
            await self.call.opened.amend(ask)

    async def leave(self) -> None:
        """No more sound; returns when everything is told."""
        self._post(Leave())
        if self._task is not None:
            await self._task

    async def close(self) -> None:
        """Stop at once; the job is cancelled."""
        self.over = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def _behind(self) -> float:
        return self._posted / LISTEN_RATE - self._listened

    def _post(self, message: msgspec.Struct) -> None:
        if self.call.opened is not None and not self.over:
            self.call.opened.post(message)

    async def _read(self) -> None:
        try:
            async with self.call.answers() as answers:
                self._opened.set()
                async for answer in answers:
                    if isinstance(answer, Listened):
                        self._listened = answer.seconds
                        self._room.set()
                    elif not isinstance(answer, Done):
                        await self._tell(answer)
        except PolymuxError as error:
            self.over = True
            with suppress(ClientLeft):
                await self._fail(error)
        except ClientLeft:
            pass  # whoever reads the socket finds out as well
        finally:
            self.over = True
            self._opened.set()
            self._room.set()


@asynccontextmanager
async def closing(hearing: Hearing) -> AsyncIterator[Hearing]:
    try:
        yield hearing
    finally:
        await hearing.close()
