"""A path of the API as data: what it takes, what it answers. Routing and OpenAPI are both made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pydantic import BaseModel
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """`handle` returns the response. `stream` is the model of one streamed frame, `media` what a body is otherwise."""

    method: str
    path: str
    summary: str
    handle: Callable[[Request], Awaitable[ASGIApp]]
    tag: str
    request: type[BaseModel] | None = None
    request_media: str = "application/json"
    response: type[BaseModel] | None = None
    stream: type[BaseModel] | None = None
    media: str = "application/json"
    task: str | None = None
    """The plugin's task behind it, for clients that know no more than its name."""
    mode: str = "none"
    """How that task answers: none, sse or bytes."""
    upload: str | None = None
    """The field of its form that carries a file."""

    def mount(self) -> Route:
        return Route(self.path, self.handle, methods=[self.method])

    @property
    def key(self) -> tuple[str, str]:
        return self.method.upper(), self.path
