"""From a checked request to a call."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from polymux.gateway.call import Call
from polymux.gateway.state import gateway_of


def open_call(request: Request, model: str, task: str, ask: msgspec.Struct, *, weight: int) -> Call:
    """Raises `ModelNotFound`, which lists the served names: no other model answers in its place."""
    gateway = gateway_of(request)
    name = gateway.service.find(model).name
    return Call(gateway, name, task, ask, weight=weight, request_id=request.state.request_id)
