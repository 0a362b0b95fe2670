"""A gateway in this process with a client for it: what tests of routes, tasks and plugins talk to.

async with open_gateway(service, plugins) as client:
    answer = await client.post("/v1/chat/completions", json={...})
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from polymux.core.plugins import Plugins
from polymux.core.service import Service
from polymux.gateway.app import create_app
from polymux.gateway.settings import GatewaySettings


@asynccontextmanager
async def open_gateway(
    service: Service, plugins: Plugins | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application over `service`, which is started and stopped with it.

    `settings` are fields of `GatewaySettings`. `core.testing.local.open_local` makes a service from model folders,
    `core.testing.service.FakeService` is one without any engine.
    """
    app = create_app(service, GatewaySettings(**settings), plugins=plugins)
    await service.start()
    try:
        await service.wait_ready()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield client
    finally:
        await service.stop()
