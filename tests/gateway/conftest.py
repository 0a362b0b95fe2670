"""A gateway over a fake service: in process for most tests, behind real sockets where those matter."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from polymux.core.testing.service import FakeService
from polymux.gateway.app import create_app
from polymux.gateway.server import Server, bind_socket
from polymux.gateway.settings import GatewaySettings


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@asynccontextmanager
async def talk(service: FakeService, **settings: object) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application in this process."""
    app = create_app(service, GatewaySettings(**settings))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        yield client


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    async with talk(service) as client:
        yield client


class Running:
    """A server on a free port of this machine."""

    def __init__(self, server: Server, listener: socket.socket) -> None:
        self.server = server
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"


@asynccontextmanager
async def serve(service: FakeService, **settings: object) -> AsyncIterator[Running]:
    values = GatewaySettings(port=0, drain_seconds=0, finish_seconds=1, **settings)  # type: ignore[arg-type]
    listener = bind_socket(values)
    server = Server(create_app(service, values), service)
    task = asyncio.create_task(server.run_until_stopped(listener))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield Running(server, listener)
    finally:
        server.should_exit = server.force_exit = True
        await asyncio.wait_for(task, 5)


@pytest.fixture
def serving() -> object:
    """`async with serving(service, max_running=1) as running:`."""
    return serve


@pytest.fixture
def talking() -> object:
    """`async with talking(service, api_keys=("k",)) as client:`."""
    return talk
