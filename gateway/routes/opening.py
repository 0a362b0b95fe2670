"""From a checked request to a call: the model must be served and must serve the task."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from polymux.core.errors import InvalidRequest
from polymux.gateway.call import Call
from polymux.gateway.state import gateway_of


def open_call(request: Request, model: str, task: str, ask: msgspec.Struct, *, weight: int) -> Call:
    """Raises `ModelNotFound`, which lists the served names, and `InvalidRequest` for a model without this task."""
    gateway = gateway_of(request)
    served = gateway.service.find(model)
    if task not in served.tasks:
        able = [name for name in gateway.service.names() if task in gateway.service.find(name).tasks]
        hint = f"these do: {', '.join(able)}" if able else "no served model does"
        raise InvalidRequest(
            f"model {served.name!r} does not serve {task!r}; {hint}", param="model", code="unsupported_task"
        )
    return Call(gateway, served.name, task, ask, weight=weight, request_id=request.state.request_id)
