"""The server's life: up before the models, draining before it goes, and what signals do."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest

from polymux.core.errors import ConfigError, ModelError
from polymux.core.tasks import ChoiceEnded, Done, TextDelta
from polymux.core.testing.service import FakeService, speak
from polymux.core.vocabulary import Receipt, Usage
from polymux.gateway.server import bind_socket
from polymux.gateway.settings import GatewaySettings

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
BODY = {"model": "stub", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def counting(seconds: float) -> Any:
    """A stream of ten words in `seconds`."""

    async def count(served: Any, task: str, ask: Any) -> Any:
        for number in range(10):
            yield TextDelta(0, str(number))
            await asyncio.sleep(seconds / 10)
        yield ChoiceEnded(0, "stop")
        yield Done(Usage(1, 10), Receipt())

    return count


async def read_stream(client: httpx.AsyncClient) -> str:
    async with client.stream("POST", PATH, json=BODY, timeout=30) as answer:
        return "".join([part async for part in answer.aiter_text()])


async def test_drain_flips_readiness_first_and_finishes_streams(service: FakeService, serving: Any) -> None:
    """sglang PR 38744: a rolling restart burst errors. Here: readiness first, zero failed."""
    service.script = counting(0.6)
    async with serving(service) as running, httpx.AsyncClient(base_url=running.url) as client:
        stream = asyncio.create_task(read_stream(client))
        while service.running == 0:
            await asyncio.sleep(0.005)
        running.server.drain(0.3)
        ready, alive = await client.get("/readyz"), await client.get("/livez")
        assert (ready.status_code, alive.status_code) == (503, 200)
        assert ready.json()["error"]["code"] == "draining"
        assert alive.headers["connection"] == "close"
        service.script = speak
        assert "[DONE]" in await read_stream(client)  # still accepted
        assert (await stream).count("[DONE]") == 1
        assert "error" not in await stream
        assert (service.finished, service.cancelled, service.failed) == (2, 0, 0)
        with pytest.raises(httpx.ConnectError):
            async with asyncio.timeout(2):
                while True:
                    await client.get("/livez")
                    await asyncio.sleep(0.02)


async def test_a_stream_that_outlasts_the_drain_is_told(service: FakeService, serving: Any) -> None:
    service.script = counting(30)
    async with serving(service) as running, httpx.AsyncClient(base_url=running.url) as client:
        stream = asyncio.create_task(read_stream(client))
        while service.running == 0:
            await asyncio.sleep(0.005)
        running.server.drain(0)
        text = await asyncio.wait_for(stream, 5)
        assert '"code":"not_ready"' in text
        assert text.endswith("data: [DONE]\n\n")


async def test_models_that_cannot_be_loaded_stop_the_server() -> None:
    from polymux.gateway.app import create_app
    from polymux.gateway.server import START_FAILED, Server

    class Broken(FakeService):
        async def wait_ready(self) -> None:
            raise ModelError("no such model")

    service = Broken()
    settings = GatewaySettings(port=0)
    server = Server(create_app(service, settings), service)
    await asyncio.wait_for(server.run_until_stopped(bind_socket(settings)), 5)
    assert server.failure is not None
    assert START_FAILED == 3


def test_port_in_use_is_a_clear_error() -> None:
    with bind_socket(GatewaySettings(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind_socket(GatewaySettings(port=port))


PROGRAM = """
import asyncio, sys
from polymux.core.testing.service import FakeService
from polymux.core.tasks import TextDelta
from polymux.gateway.app import create_app
from polymux.gateway.server import bind_socket, run_server
from polymux.gateway.settings import GatewaySettings

async def endless(served, task, ask):
    while True:
        yield TextDelta(0, "x")
        await asyncio.sleep(0.01)

settings = GatewaySettings(port=0, drain_seconds=float(sys.argv[1]), finish_seconds=30)
service = FakeService(script=endless)
listener = bind_socket(settings)
app = create_app(service, settings)
ready = lambda: print(listener.getsockname()[1], flush=True)
sys.exit(run_server(app, service, listener, on_ready=ready))
"""


@pytest.mark.parametrize(
    ("signals", "wait", "status"),
    [
        ([signal.SIGTERM], "0", 128 + signal.SIGTERM),
        ([signal.SIGINT], "60", 128 + signal.SIGINT),
        ([signal.SIGTERM, signal.SIGTERM], "60", 128 + signal.SIGTERM),
    ],
    ids=["SIGTERM waits", "SIGINT skips the wait", "the second forces"],
)
def test_signals(signals: list[int], wait: str, status: int) -> None:
    """A real process and real signals; the last case leaves a stream that would never end."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, wait], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ""}
    )
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        with httpx.Client(base_url=url) as client:
            if len(signals) == 1:
                assert client.get("/readyz").status_code == 200
                process.send_signal(signals[0])
            else:
                with client.stream("POST", PATH, json=BODY) as answer:
                    next(answer.iter_bytes())
                    process.send_signal(signals[0])
                    while httpx.get(f"{url}/readyz").status_code == 200:
                        time.sleep(0.01)
                    assert httpx.get(f"{url}/livez").status_code == 200
                    process.send_signal(signals[1])
                    assert process.wait(5) == status
        assert process.wait(5) == status
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
async def test_a_connection_that_was_idle_for_longer_than_servers_use_to_wait_is_still_served(
    service: FakeService, serving: Any
) -> None:
    """uvicorn closes after 5 s by itself, which is when clients send again: what was just being sent was lost."""
    limits = httpx.Limits(keepalive_expiry=60)
    async with serving(service) as running, httpx.AsyncClient(base_url=running.url, limits=limits) as client:
        opened = [(await client.get("/livez")).extensions["network_stream"].get_extra_info("client_addr")]
        await asyncio.sleep(6.0)
        opened.append((await client.get("/livez")).extensions["network_stream"].get_extra_info("client_addr"))
    assert opened[0] == opened[1]
