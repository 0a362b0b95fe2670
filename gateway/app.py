"""The Starlette application over a Service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from polymux.core.errors import PolymuxError
from polymux.core.plugins import Plugins
from polymux.gateway.access import Access
from polymux.gateway.auth import Auth
from polymux.gateway.errors import on_http_exception, on_polymux_error
from polymux.gateway.extensions import gather_middleware, gather_routes
from polymux.gateway.routes import (
    chat,
    completions,
    docs,
    embeddings,
    health,
    images,
    messages,
    models,
    ranking,
    realtime,
    receipts,
    responses,
    speech,
    streams,
    tasks,
    tokens,
    transcriptions,
    videos,
)
from polymux.gateway.routes import plugins as known_plugins
from polymux.gateway.settings import GatewaySettings
from polymux.gateway.state import Gateway

if TYPE_CHECKING:
    from polymux.core.service import Service


def create_app(
    service: Service,
    settings: GatewaySettings | None = None,
    *,
    plugins: Plugins | None = None,
    extra_routes: Sequence[BaseRoute] = (),
    gateway: Gateway | None = None,
) -> Starlette:
    """The gateway. What plugins add stands behind the same keys, log and errors as our own.

    `gateway` is that of an application whose place this one takes (`refresh_app`).
    `extra_routes` are of whoever embeds the application, beside those of `plugins`.
    Raises `ConfigError` for settings that would be unsafe.
    """
    settings = settings or GatewaySettings()
    settings.check()
    plugins = plugins or Plugins()
    gateway = gateway or Gateway(service, settings, plugins)
    endpoints = [
        chat.ENDPOINT,
        completions.ENDPOINT,
        responses.ENDPOINT,
        *messages.ENDPOINTS,
        embeddings.ENDPOINT,
        *ranking.ENDPOINTS,
        *tokens.ENDPOINTS,
        *transcriptions.ENDPOINTS,
        speech.ENDPOINT,
        realtime.ENDPOINT,
        streams.ENDPOINT,
        *images.ENDPOINTS,
        *videos.ENDPOINTS,
        *models.ENDPOINTS,
        receipts.ENDPOINT,
        known_plugins.ENDPOINT,
        *health.ENDPOINTS,
    ]
    endpoints += tasks.make_endpoints(plugins, taken={endpoint.key for endpoint in endpoints})
    app = Starlette(
        routes=[
            *(endpoint.mount() for endpoint in endpoints),
            *realtime.SOCKETS,
            *streams.SOCKETS,
            *docs.make_routes(endpoints),
            *extra_routes,
            *gather_routes(plugins),
        ],
        middleware=[
            Middleware(Access, gateway=gateway),
            Middleware(Auth, keys=settings.api_keys, secrets=gateway.secrets),
            *gather_middleware(plugins),
        ],
        exception_handlers={PolymuxError: on_polymux_error, HTTPException: on_http_exception},
    )
    app.router.redirect_slashes = False
    app.state.gateway = gateway
    return app


def refresh_app(app: Starlette, plugins: Plugins) -> None:
    """Let `app` serve what these plugins bring from the next request on. Limits, metrics and running answers stay."""
    gateway = app.state.gateway
    assert isinstance(gateway, Gateway)
    fresh = create_app(gateway.service, gateway.settings, plugins=plugins, gateway=gateway)
    gateway.plugins = plugins
    app.router = fresh.router
    app.middleware_stack = fresh.build_middleware_stack()
