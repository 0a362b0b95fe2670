"""A slow consumer costs bounded memory and holds nobody up."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from polymux.core.engine import stream as module
from polymux.core.engine.lease import process_pool
from polymux.core.engine.stream import MERGE_AFTER, EventStream
from polymux.core.engine.wire import INLINE_BYTES, pack
from polymux.core.errors import EngineDied, Overloaded
from polymux.core.vocabulary import BranchEnded, Ended, Event, Output, Receipt, Tokens


class Sound(msgspec.Struct):
    samples: np.ndarray


def read(stream: EventStream) -> list[Event]:
    async def collect() -> list[Event]:
        return [event async for event in stream]

    return asyncio.run(collect())


def test_unread_tokens_are_merged_in_order_per_branch() -> None:
    stream = EventStream("j", lambda job: None)
    for index in range(10_000):
        stream.push(Tokens("j", index % 2, [index], [-float(index)], [[(index, 0.0)]]))
    stream.push(BranchEnded("j", 0, "stop"))
    stream.push(Ended("j", Receipt()))
    events = read(stream)
    assert len(events) == MERGE_AFTER + 2
    for branch in (0, 1):
        tokens = [event for event in events if isinstance(event, Tokens) and event.branch == branch]
        ids = [token for event in tokens for token in event.ids]
        assert ids == list(range(branch, 10_000, 2))
        assert [-score for event in tokens for score in event.logprobs or ()] == ids
        assert [top[0][0] for event in tokens for top in event.top or ()] == ids


def test_a_backlog_of_output_ends_the_job_and_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_EVENTS", 10)
    left: list[str] = []
    stream = EventStream("j", left.append)
    for _ in range(12):
        stream.push(Output("j", "sound", pack(Sound(np.zeros(INLINE_BYTES, np.uint8)))))
    assert left == ["j"]
    assert process_pool().outstanding == 0
    with pytest.raises(Overloaded, match="too slowly"):
        read(stream)


def test_bytes_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    left: list[str] = []
    stream = EventStream("j", left.append)
    stream.push(Output("j", "sound", pack(Sound(np.zeros(500, np.uint8)))))
    assert not left
    stream.push(Output("j", "sound", pack(Sound(np.zeros(500, np.uint8)))))
    assert left == ["j"]


def test_what_arrived_before_the_engine_died_is_still_read() -> None:
    stream = EventStream("j", lambda job: None)
    stream.push(Tokens("j", 0, [1]))
    stream.fail(EngineDied("gone"))

    async def go() -> None:
        assert await anext(stream) == Tokens("j", 0, [1])
        with pytest.raises(EngineDied):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(go())


def test_closing_cancels_once_and_wakes_a_waiting_reader() -> None:
    left: list[str] = []

    async def go() -> None:
        stream = EventStream("j", left.append)
        reader = asyncio.create_task(anext(stream, None))
        await asyncio.sleep(0)
        stream.close()
        stream.close()
        assert await reader is None

    asyncio.run(go())
    assert left == ["j"]


def test_closing_a_finished_stream_cancels_nothing() -> None:
    left: list[str] = []
    stream = EventStream("j", left.append)
    stream.push(Ended("j", Receipt()))
    stream.close()
    assert not left
