"""What the routes share: one object per application."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from starlette.requests import HTTPConnection

from polymux.core.arrival import MOST_ARRIVING
from polymux.gateway.fetch import Fetcher
from polymux.gateway.filming import FilmJobs
from polymux.gateway.limits import Gates
from polymux.gateway.metrics import Metrics
from polymux.gateway.realtime.secrets import Secrets
from polymux.gateway.receipts import Receipts
from polymux.gateway.settings import GatewaySettings
from polymux.gateway.shelf import Shelf

if TYPE_CHECKING:
    from polymux.core.plugins import Plugins
    from polymux.core.service import Service


class Gateway:
    def __init__(self, service: Service, settings: GatewaySettings, plugins: Plugins) -> None:
        self.service = service
        self.plugins = plugins
        self.settings = settings
        self.gates = Gates(settings.max_running, settings.max_waiting)
        self.metrics = Metrics(self.gates, service)
        self.receipts = Receipts()
        self.secrets = Secrets()
        self.fetcher = Fetcher(settings)
        self.started = int(time.time())
        self.shelf = Shelf()
        self.films = FilmJobs(self.shelf)
        self.arriving = asyncio.Semaphore(MOST_ARRIVING)
        """Places of the uploads that are worked on while they arrive."""
        self.draining = False
        """Set on SIGTERM: `/readyz` says 503, answers close their connections, requests are still served."""

    @property
    def ready(self) -> bool:
        return self.service.ready and not self.draining


def gateway_of(request: HTTPConnection) -> Gateway:
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway
