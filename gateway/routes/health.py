"""`/livez`, `/readyz` and `/metrics`. They answer while models load and while the server drains."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from polymux.core.errors import NotReady
from polymux.gateway.metrics import CONTENT_TYPE
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.state import gateway_of


async def show_life(request: Request) -> ASGIApp:
    """200 as long as this process can answer at all: a draining server must not be killed for it."""
    return JSONResponse({"status": "alive"})


async def show_readiness(request: Request) -> ASGIApp:
    gateway = gateway_of(request)
    if gateway.draining:
        raise NotReady("draining: no new work, please", code="draining")
    if not gateway.service.ready:
        raise NotReady("the engine is loading or restarting")
    return JSONResponse({"status": "ready"})


async def show_metrics(request: Request) -> ASGIApp:
    return Response(gateway_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE})


ENDPOINTS = (
    Endpoint(method="GET", path="/livez", summary="Is the process alive?", tag="health", handle=show_life),
    Endpoint(method="GET", path="/readyz", summary="Can it take requests?", tag="health", handle=show_readiness),
    Endpoint(
        method="GET",
        path="/metrics",
        summary="Counters and gauges for Prometheus",
        tag="health",
        handle=show_metrics,
        media="text/plain",
    ),
)
