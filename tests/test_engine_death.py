"""Kill -9 of the engine under a stream, seen from outside: an error frame, readiness that says so, and then work."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from polymux.core.engine.spec import EngineSpec
from polymux.core.engine.supervisor import EngineProcess, Restarts
from polymux.core.pipeline import Front, Prepared, Presenter
from polymux.core.service import Served, Service
from polymux.core.tasks import Chat, ChoiceEnded, Done, TextDelta
from polymux.core.testing.counting import COMMAND, Count
from polymux.core.vocabulary import Ended, Event, Tokens, Usage
from polymux.gateway.app import create_app
from polymux.gateway.server import Server, bind_socket
from polymux.gateway.settings import GatewaySettings


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class CountingPresenter(Presenter):
    def feed(self, event: Event) -> list[msgspec.Struct]:
        if isinstance(event, Tokens):
            return [TextDelta(0, f"{token} ") for token in event.ids]
        assert isinstance(event, Ended)
        return [ChoiceEnded(0, "stop"), Done(Usage(), event.receipt)]


class CountingFront(Front):
    """Chat that counts to `max_tokens`."""

    def prepare(self, task: str, ask: msgspec.Struct) -> Prepared:
        assert isinstance(ask, Chat)
        return Prepared(Count(ask.max_tokens or 1, pause=0.001))

    def present(self, task: str, ask: msgspec.Struct, prepared: Prepared) -> Presenter:
        return CountingPresenter()


@asynccontextmanager
async def serve() -> AsyncIterator[tuple[EngineProcess, httpx.AsyncClient]]:
    engine = EngineProcess(EngineSpec(name="counter"), command=COMMAND, restarts=Restarts(first=0.5))
    service = Service([Served("counter", ("chat",), CountingFront(), engine)])
    settings = GatewaySettings(port=0, drain_seconds=0, finish_seconds=1)
    listener = bind_socket(settings)
    server = Server(create_app(service, settings), service)
    serving = asyncio.create_task(server.run_until_stopped(listener))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            while not (server.started and service.ready):
                await asyncio.sleep(0.01)
            yield engine, client
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, 10)


def ask(tokens: int, *, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": "count"}]
    return {"model": "counter", "messages": messages, "max_tokens": tokens, "stream": stream}


@pytest.mark.anyio
async def test_a_killed_engine_is_told_in_the_stream_and_by_readyz_and_comes_back() -> None:
    async with serve() as (engine, client):
        killed = 0.0
        frames: list[str] = []
        async with client.stream("POST", "/v1/chat/completions", json=ask(10**6, stream=True)) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                frames += [line.removeprefix("data: ")] if line else []
                if len(frames) == 5:
                    killed = time.monotonic()
                    os.kill(engine.pid or 0, signal.SIGKILL)
        assert time.monotonic() - killed < 2.0
        *_, failure, done = frames
        assert json.loads(failure)["error"]["code"] == "engine_died"
        assert done == "[DONE]"

        readiness = await client.get("/readyz")
        refused = await client.post("/v1/chat/completions", json=ask(3, stream=False))
        assert (readiness.status_code, refused.status_code) == (503, 503)
        assert refused.headers["retry-after"]
        assert (await client.get("/livez")).status_code == 200

        while (await client.get("/readyz")).status_code != 200:
            await asyncio.sleep(0.02)
        answer = await client.post("/v1/chat/completions", json=ask(3, stream=False))
        assert answer.json()["choices"][0]["message"]["content"] == "0 1 2 "
