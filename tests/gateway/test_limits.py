"""Overload is answered at once and honestly; what was accepted finishes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from polymux.core.errors import Overloaded
from polymux.core.testing.service import FakeService, speak
from polymux.gateway.limits import Gate

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
BODY = {"model": "stub", "messages": [{"role": "user", "content": "hi"}]}


class Held:
    """A script that answers only when told."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, served: Any, task: str, ask: Any) -> Any:
        await self.go.wait()
        async for answer in speak(served, task, ask):
            yield answer


async def settle(condition: Any) -> None:
    async with asyncio.timeout(2):
        while not condition():
            await asyncio.sleep(0.001)


async def test_overload_is_429_with_retry_after_and_fast(service: FakeService, talking: Any) -> None:
    """vllm 18826, 2901: there was no answer to overload. Accepted requests finish."""
    held = service.script = Held()
    async with talking(service, max_running=2, max_waiting=2) as client:
        accepted = [asyncio.create_task(client.post(PATH, json=BODY)) for _ in range(4)]
        await settle(lambda: service.running == 2)
        await asyncio.sleep(0.02)
        metrics = (await client.get("/metrics")).text
        assert 'polymux_num_requests_running{model="stub"} 2.0' in metrics
        assert 'polymux_num_requests_waiting{model="stub"} 2.0' in metrics
        begin = time.perf_counter()
        refused = await client.post(PATH, json=BODY)
        assert time.perf_counter() - begin < 0.1
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        held.go.set()
        assert [answer.status_code for answer in await asyncio.gather(*accepted)] == [200] * 4
        assert "polymux_admission_rejections_total" in (await client.get("/metrics")).text


async def test_n_is_counted(service: FakeService, talking: Any) -> None:
    """Twelve choices are twelve, whether one request asks for them or twelve."""
    held = service.script = Held()
    async with talking(service, max_running=8, max_waiting=4) as client:
        first = asyncio.create_task(client.post(PATH, json={**BODY, "n": 8}))
        await settle(lambda: service.running == 1)
        assert (await client.post(PATH, json={**BODY, "n": 5})).status_code == 429
        second = asyncio.create_task(client.post(PATH, json={**BODY, "n": 4}))
        await asyncio.sleep(0.02)
        assert service.running == 1
        held.go.set()
        assert (await first).status_code == (await second).status_code == 200


async def test_one_models_queue_is_not_anothers(service: FakeService, talking: Any) -> None:
    from polymux.core.testing.service import FakeServed

    service.models = (FakeServed("one"), FakeServed("two"))

    async def one_hangs(served: Any, task: str, ask: Any) -> Any:
        if served.name == "one":
            await asyncio.Event().wait()
        async for answer in speak(served, task, ask):
            yield answer

    service.script = one_hangs
    async with talking(service, max_running=1, max_waiting=0) as client:
        hanging = asyncio.create_task(client.post(PATH, json={**BODY, "model": "one"}))
        await settle(lambda: service.running == 1)
        assert (await client.post(PATH, json={**BODY, "model": "one"})).status_code == 429
        assert (await client.post(PATH, json={**BODY, "model": "two"})).status_code == 200
        hanging.cancel()


async def test_gate_gives_back_what_a_cancelled_waiter_held() -> None:
    """Whoever leaves the queue, at whatever moment, leaves nothing behind; order of arrival holds."""
    gate = Gate(max_running=2, max_waiting=100)
    order: list[int] = []

    async def work(name: int, weight: int) -> None:
        async with gate.admit(weight):
            order.append(name)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(work(name, 1 + name % 3)) for name in range(30)]
    await asyncio.sleep(0)
    for task in tasks[3::4]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert (gate.running, gate.waiting) == (0, 0)
    assert order == sorted(order)
    assert sum(isinstance(each, asyncio.CancelledError) for each in results) == len(tasks[3::4])


async def test_gate_cancelled_in_the_turn_it_was_admitted() -> None:
    gate = Gate(max_running=1, max_waiting=5)
    holder = gate.admit(1)
    await holder.__aenter__()

    async def wait() -> None:
        async with gate.admit(1):
            pass

    waiter = asyncio.create_task(wait())
    await asyncio.sleep(0)
    await holder.__aexit__(None, None, None)  # admits the waiter, which has not run yet
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert (gate.running, gate.waiting) == (0, 0)


async def test_retry_after_follows_the_queue() -> None:
    gate = Gate(max_running=1, max_waiting=0)
    async with gate.admit(1):
        with pytest.raises(Overloaded) as refused:
            async with gate.admit(1):
                pass
    assert 1 <= refused.value.retry_after <= 60


async def test_not_ready_is_503_with_retry_after(client: httpx.AsyncClient, service: FakeService) -> None:
    """vllm 19881: the engine was dead and health said 200. ray 36460: probes hung while loading."""
    service.ready = False
    for answer in (await client.post(PATH, json=BODY), await client.get("/readyz")):
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "not_ready"
    assert (await client.get("/livez")).status_code == 200
    assert (await client.get("/metrics")).status_code == 200
    service.ready = True
    assert (await client.get("/readyz")).status_code == 200
    assert (await client.post(PATH, json=BODY)).status_code == 200
