"""A client that leaves stops its work, streaming or not, queued or running (vllm 9428, 54947, ATOM PR 1441)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from polymux.core.tasks import ChoiceEnded, Done, TextDelta
from polymux.core.testing.service import FakeService, speak
from polymux.core.vocabulary import Receipt, Usage

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
BODY = {"model": "stub", "messages": [{"role": "user", "content": "hi"}]}


async def endless(served: Any, task: str, ask: Any) -> Any:
    while True:
        yield TextDelta(0, "x")
        await asyncio.sleep(0.005)


async def silent(served: Any, task: str, ask: Any) -> Any:
    await asyncio.sleep(60)
    yield Done(Usage(), Receipt())


async def settle(condition: Any, seconds: float = 1.0) -> float:
    begin = time.perf_counter()
    while not condition():
        assert time.perf_counter() - begin < seconds, "the work went on"
        await asyncio.sleep(0.002)
    return time.perf_counter() - begin


@pytest.mark.parametrize(("script", "streamed"), [(endless, True), (silent, True), (silent, False), (endless, False)])
async def test_leaving_cancels(service: FakeService, serving: Any, script: Any, streamed: bool) -> None:
    service.script = script
    async with serving(service) as running, httpx.AsyncClient(base_url=running.url) as client:
        asking = asyncio.create_task(_drink(client, streamed))
        await settle(lambda: service.running == 1)
        await asyncio.sleep(0.02)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert await settle(lambda: service.running == 0) < 0.5
        assert service.cancelled == 1
        service.script = speak
        assert (await client.post(PATH, json=BODY)).status_code == 200
        metrics = (await client.get("/metrics")).text
        assert 'polymux_num_aborted_requests_total{model="stub",task="chat"} 1.0' in metrics
        assert 'polymux_num_requests_running{model="stub"} 0.0' in metrics


async def test_leaving_the_queue(service: FakeService, serving: Any) -> None:
    """One that never reached the engine leaves its place too."""
    service.script = silent
    async with serving(service, max_running=1) as running, httpx.AsyncClient(base_url=running.url) as client:
        first = asyncio.create_task(client.post(PATH, json=BODY, timeout=60))
        await settle(lambda: service.running == 1)
        second = asyncio.create_task(client.post(PATH, json=BODY, timeout=60))
        gate = running.server.gateway.gates.of("stub")
        await settle(lambda: gate.waiting == 1)
        second.cancel()
        await settle(lambda: gate.waiting == 0)
        first.cancel()
        await settle(lambda: gate.running == 0)
        assert len(service.opened) == 1


async def test_leaving_mid_body_costs_nothing(service: FakeService, serving: Any) -> None:
    async with serving(service) as running, httpx.AsyncClient(base_url=running.url) as client:
        port = int(running.url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n"
        writer.write(head.encode() + b'{"model"')
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.close()
        assert (await client.post(PATH, json=BODY)).status_code == 200
        assert len(service.opened) == 1


async def test_many_leave_and_nothing_is_left(service: FakeService, serving: Any) -> None:
    service.script = endless
    async with serving(service) as running, httpx.AsyncClient(base_url=running.url) as client:
        asking = [asyncio.create_task(_drink(client, True)) for _ in range(40)]
        await settle(lambda: service.running == 40, seconds=5)
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await settle(lambda: service.running == 0)
        assert running.server.gateway.gates.of("stub").running == 0


async def test_a_whole_answer_is_not_mistaken_for_leaving(service: FakeService, serving: Any) -> None:
    """On a kept connection the end of an answer looks like a disconnect to the server."""
    async with serving(service) as running, httpx.AsyncClient(base_url=running.url) as client:
        for streamed in (True, False) * 10:
            assert (await client.post(PATH, json={**BODY, "stream": streamed})).status_code == 200
        assert (service.finished, service.cancelled) == (20, 0)


async def test_slow_reader_does_not_slow_others(service: FakeService, serving: Any) -> None:
    """A client that stops reading is held back by its own socket."""

    async def plenty(served: Any, task: str, ask: Any) -> Any:
        for _ in range(20_000):
            yield TextDelta(0, "x" * 200)
            await asyncio.sleep(0)
        yield ChoiceEnded(0, "stop")
        yield Done(Usage(1, 20_000), Receipt())

    service.script = plenty
    async with serving(service) as running, httpx.AsyncClient(base_url=running.url) as client:
        async with client.stream("POST", PATH, json={**BODY, "stream": True}) as slow:
            await anext(slow.aiter_bytes())
            await asyncio.sleep(0.1)
            service.script = speak
            begin = time.perf_counter()
            assert (await client.post(PATH, json=BODY)).status_code == 200
            assert time.perf_counter() - begin < 0.5
        await settle(lambda: service.running == 0)


async def _drink(client: httpx.AsyncClient, streamed: bool) -> None:
    if not streamed:
        await client.post(PATH, json=BODY, timeout=60)
        return
    async with client.stream("POST", PATH, json={**BODY, "stream": True}, timeout=60) as answer:
        async for _ in answer.aiter_bytes():
            pass
