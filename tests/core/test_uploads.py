"""Uploads that are read lazily keep pace with the engine: what it has not taken is not read ahead without end."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from polymux.core.answers import AHEAD, UNREAD
from polymux.core.engine.lease import process_pool
from polymux.core.engine.wire import pack, unpack
from polymux.core.pipeline import Front, Prepared, Presenter
from polymux.core.service import Served, Service
from polymux.core.tasks import Done
from polymux.core.testing.engine import LocalEngine
from polymux.core.vocabulary import Cancel, Command, Ended, Event, Output, Post, Receipt, Report, Submit, Usage

PIECES = 40
SIZE = 1 << 20
"""Bytes of a piece."""


class Work(msgspec.Struct):
    pass


class Piece(msgspec.Struct):
    number: int
    data: np.ndarray


class Taken(msgspec.Struct):
    number: int


class ReadingLoop:
    """Takes one piece a step, once the gate is open."""

    def __init__(self, site: Any = None, programs: Any = None) -> None:
        self.gate = threading.Event()
        self.job: str | None = None
        self.inbox: deque[msgspec.Raw] = deque()
        self.reports: list[Report] = []

    def handle(self, command: Command) -> None:
        match command:
            case Submit(job=job):
                self.job = job
            case Post(body=body):
                self.inbox.append(body)
            case Cancel():
                self.job = None

    def step(self) -> bool:
        if self.job is None or not self.inbox or not self.gate.wait(0.01):
            return False
        number = unpack(self.inbox.popleft(), Piece).number
        self.reports.append(Output(self.job, "taken", pack(Taken(number))))
        if number == PIECES - 1:
            self.reports.append(Ended(self.job, Receipt()))
        return True

    def take_reports(self) -> list[Report]:
        reports, self.reports = self.reports, []
        return reports

    def stats(self) -> dict[str, float]:
        return {}


class UploadFront(Front):
    def __init__(self) -> None:
        self.read = 0

    def prepare(self, task: str, ask: msgspec.Struct) -> Prepared:
        return Prepared(Work(), messages=self._pieces())

    def present(self, task: str, ask: msgspec.Struct, prepared: Prepared) -> Presenter:
        return UploadPresenter()

    def _pieces(self) -> Iterator[msgspec.Struct]:
        for number in range(PIECES):
            self.read += 1
            yield Piece(number, np.zeros(SIZE, np.uint8))


class UploadPresenter(Presenter):
    def feed(self, event: Event) -> list[msgspec.Struct]:
        if isinstance(event, Output):
            return [unpack(event.body, Taken)]
        return [Done(Usage(), Receipt())]


def test_reading_pauses_until_the_engine_takes_more() -> None:
    async def go() -> None:
        front, engine = UploadFront(), LocalEngine({}, make_loop=ReadingLoop)
        service = Service([Served("reader", ("upload",), front, engine)])
        await service.start()
        await service.wait_ready()
        try:
            async with service.open("reader", "upload", Work()) as answers:
                async with asyncio.timeout(5):
                    while front.read * SIZE <= UNREAD:
                        await asyncio.sleep(0.01)
                await asyncio.sleep(0.2)
                assert front.read == UNREAD // SIZE + 1
                engine.loop.gate.set()
                numbers = [answer.number async for answer in answers if isinstance(answer, Taken)]
            assert numbers == list(range(PIECES))
            assert process_pool().outstanding == 0
        finally:
            await service.stop()

    asyncio.run(go())


def test_leaving_while_reading_pauses_gives_everything_back() -> None:
    async def go() -> None:
        front, engine = UploadFront(), LocalEngine({}, make_loop=ReadingLoop)
        service = Service([Served("reader", ("upload",), front, engine)])
        await service.start()
        await service.wait_ready()
        try:
            async with service.open("reader", "upload", Work()):
                async with asyncio.timeout(5):
                    while front.read * SIZE <= UNREAD:
                        await asyncio.sleep(0.01)
            async with asyncio.timeout(5):
                while process_pool().outstanding:
                    await asyncio.sleep(0.01)
            assert front.read < PIECES
        finally:
            await service.stop()

    asyncio.run(go())


def test_a_slow_reader_holds_the_rest_back() -> None:
    """Whoever does not read what the engine made of the first pieces is not sent more: the engine pauses with it."""

    async def go() -> None:
        front, engine = UploadFront(), LocalEngine({}, make_loop=ReadingLoop)
        service = Service([Served("reader", ("upload",), front, engine)])
        await service.start()
        await service.wait_ready()
        engine.loop.gate.set()
        try:
            async with service.open("reader", "upload", Work()) as answers:
                async with asyncio.timeout(10):
                    while front.read <= AHEAD:
                        await asyncio.sleep(0.01)
                await asyncio.sleep(0.3)
                assert front.read < PIECES
                numbers = [answer.number async for answer in answers if isinstance(answer, Taken)]
            assert numbers == list(range(PIECES))
        finally:
            await service.stop()

    asyncio.run(go())
