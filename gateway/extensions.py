"""What plugins add to the application beside tasks: routes and middleware, so that a broken one costs only itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from starlette.middleware import Middleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from polymux.core.errors import PluginError
from polymux.core.plugins import Plugins

logger = logging.getLogger("polymux.gateway")


def gather_routes(plugins: Plugins) -> list[BaseRoute]:
    """The routes of every plugin; one that is none costs its plugin."""
    found: list[BaseRoute] = []
    for plugin, routes in plugins.answers("routes"):
        wrong = next((route for route in routes if not isinstance(route, BaseRoute)), None)
        if wrong is None:
            found += routes
        else:
            error = PluginError(f"it returned a {type(wrong).__name__} where a Starlette route belongs")
            plugins.blame("routes", wrong, error)
            logger.error("%s", plugin.fault)
    return found


def gather_middleware(plugins: Plugins) -> list[Middleware]:
    """The middleware of every plugin, each behind a guard."""
    found: list[Middleware] = []
    for _, entries in plugins.answers("middleware"):
        for entry in entries:
            found.append(Middleware(Guard, entry=entry, blame=_blamer(plugins, entry)))
    return found


def _blamer(plugins: Plugins, entry: Any) -> Callable[[BaseException], None]:
    def blame(error: BaseException) -> None:
        plugin = plugins.blame("middleware", entry, error)
        logger.error("middleware is left out: %s", plugin.fault if plugin else error)

    return blame


class Guard:
    """Runs one plugin's middleware. When it raises by itself it is left out from then on.

    The request it was to handle goes on without it, unless it has already begun to answer. What raises behind it
    (an endpoint, another middleware) passes through untouched.
    """

    def __init__(self, app: ASGIApp, entry: Any, blame: Callable[[BaseException], None]) -> None:
        self.app = app
        self.blame = blame
        self.middleware: ASGIApp | None = None
        try:
            self.middleware = entry.cls(self._enter, *entry.args, **entry.kwargs)
        except Exception as error:
            blame(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.middleware is None:
            await self.app(scope, receive, send)
            return
        passage = Passage()
        try:
            await self.middleware({**scope, "polymux.passage": passage}, receive, passage.watch(send))
        except Exception as error:
            if error is passage.raised or passage.entered or passage.answered:
                raise
            self.middleware = None
            self.blame(error)
            await self.app(scope, receive, send)

    async def _enter(self, scope: Scope, receive: Receive, send: Send) -> None:
        passage = scope.get("polymux.passage")
        if not isinstance(passage, Passage):
            await self.app(scope, receive, send)
            return
        passage.entered = True
        try:
            await self.app(scope, receive, send)
        except Exception as error:
            passage.raised = error
            raise


class Passage:
    """How far one request came through one middleware."""

    def __init__(self) -> None:
        self.entered = False
        self.answered = False
        self.raised: Exception | None = None

    def watch(self, send: Send) -> Send:
        async def note(message: Any) -> None:
            self.answered = True
            await send(message)

        return note
