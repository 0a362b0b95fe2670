"""uvicorn around the application: up before the models are, gone only after the last answer.

SIGTERM   /readyz 503 at once, /livez stays 200; requests are accepted for `drain_seconds` more, so that balancers
          notice; then the socket closes and running answers have `finish_seconds`; what is left is told and cut
SIGINT    the same without the wait for balancers
again     stop now
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette

from polymux.core.errors import ConfigError, PolymuxError
from polymux.gateway.settings import GatewaySettings
from polymux.gateway.state import Gateway

if TYPE_CHECKING:
    from polymux.core.service import Service

logger = logging.getLogger("polymux.gateway")

START_FAILED = 3

MAX_FRAME = 24 * 2**20
"""Bytes of one message on a socket: 15 MiB of sound in base64, with room. What is larger closes it (1009)."""


def bind_socket(settings: GatewaySettings) -> socket.socket:
    """The listening socket. Raises `ConfigError` when the address cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host.strip("[]"), settings.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        reason = f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}"
        raise ConfigError(f"{reason}; choose another --port or --host", param="port") from error
    return listener


def run_server(
    app: Starlette,
    service: Service,
    listener: socket.socket,
    *,
    on_ready: Callable[[], None] = lambda: None,
    beside: Coroutine[None, None, None] | None = None,
) -> int:
    """Serve until told to stop; returns the exit status: 128 + signal, or 3 when the models could not be loaded.

    `beside` runs from when the models are ready until the end.
    """
    server = Server(app, service, on_ready, beside)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.run_until_stopped(listener))
    if server.failure is not None:
        logger.error("%s", server.failure.message)
        return START_FAILED
    return 128 + server.stopped_by if server.stopped_by else 0


KEEP_ALIVE = 75
"""Seconds that an idle connection is kept: longer than clients keep theirs (httpx 5, others 60). Who closes first must
not be the server, or a request that is just being sent is lost."""


class Server(uvicorn.Server):
    """Runs the service beside the application. Signals are handled from before the first model is loaded."""

    def __init__(
        self,
        app: Starlette,
        service: Service,
        on_ready: Callable[[], None] = lambda: None,
        beside: Coroutine[None, None, None] | None = None,
    ) -> None:
        gateway = app.state.gateway
        assert isinstance(gateway, Gateway)
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws_max_size=MAX_FRAME,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=max(1, round(gateway.settings.finish_seconds)),
            )
        )
        self.gateway = gateway
        self.service = service
        self.stopped_by = 0
        self.failure: PolymuxError | None = None
        self._on_ready = on_ready
        self._beside = beside
        self._stop_at: float | None = None

    async def run_until_stopped(self, listener: socket.socket) -> None:
        loading = asyncio.create_task(self._load())
        try:
            await self.serve(sockets=[listener])
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await self.service.stop()

    async def _load(self) -> None:
        try:
            await self.service.start()
            await self.service.wait_ready()
        except PolymuxError as error:
            self.failure = error
            self.should_exit = True
        else:
            # what is here now stays: the collector need not walk it again, which costs tens of milliseconds each time
            gc.collect()
            gc.freeze()
            self._on_ready()
            if self._beside is not None:
                await self._beside

    def drain(self, seconds: float) -> None:
        """Take no part in balancing any more; close the socket in `seconds`."""
        self.gateway.draining = True
        self._stop_at = time.monotonic() + seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.stopped_by:
            self.should_exit = self.force_exit = True
            return
        self.stopped_by = sig
        self.drain(self.gateway.settings.drain_seconds if sig == signal.SIGTERM else 0.0)

    async def on_tick(self, counter: int) -> bool:
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            self.should_exit = True
        return await super().on_tick(counter)
