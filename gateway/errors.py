"""Every failure leaves the gateway as `{"error": {message, type, param, code}}` with the status it deserves."""

from __future__ import annotations

import logging
import math
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from polymux.core.errors import InternalError, InvalidRequest, PolymuxError

logger = logging.getLogger("polymux.gateway")

MAX_PARAM = 200
"""Characters of a field's path that are sent back: the name of an unknown field is the client's own text."""

CLIENT_LEFT = 499
"""Logged, never sent: nobody is there to read it."""


class ClientLeft(Exception):
    """The client closed its connection before the answer was complete."""


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


class NotFound(InvalidRequest):
    status = 404
    code = "not_found"


class RequestTimeout(InvalidRequest):
    status = 408
    code = "request_timeout"


def describe_error(error: PolymuxError) -> dict[str, Any]:
    """The body of an error answer, and the data of an error frame in a stream."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def answer_error(
    error: PolymuxError, headers: dict[str, str] | None = None, body: dict[str, Any] | None = None
) -> Response:
    """The response for `error`, with Retry-After (whole seconds, at least 1) where it helps."""
    headers = dict(headers or {})
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    content = msgspec.json.encode(body or describe_error(error))
    return Response(content, status_code=error.status, headers=headers, media_type="application/json")


def explain_validation(error: ValidationError) -> InvalidRequest:
    """Pydantic's first complaint in the user's words; `param` is the path of the field, as in messages[0].role."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _path(first["loc"])
    kind = first["type"]
    if kind == "extra_forbidden":
        message = f"{param!r} is not a parameter of this endpoint"
        return InvalidRequest(message, param=param, code="unsupported_parameter")
    if kind == "unsupported_parameter":
        return InvalidRequest(f"{param!r}: {first['msg']}", param=param, code="unsupported_parameter")
    if kind == "missing":
        return InvalidRequest(f"{param!r} is required", param=param, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"{param!r}: {message}" if param else message, param=param, code="invalid_value")


def _path(steps: tuple[int | str, ...]) -> str | None:
    """A location as the user wrote it; tags of unions (`schemas.base.choose`) are left out."""
    path = ""
    for step in steps:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("<"):
            path += f".{step}" if path else step
    return path[:MAX_PARAM] or None


def from_http(error: HTTPException) -> PolymuxError:
    """Starlette's own exceptions (no such path, wrong method) as ours."""
    if error.status_code == 404:
        return NotFound("there is no such path here; /docs lists what there is")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return MethodNotAllowed(f"this path does not take that method; it takes: {allowed}")
    wrapped = InvalidRequest(str(error.detail)) if error.status_code < 500 else InternalError(str(error.detail))
    wrapped.status = error.status_code
    return wrapped


async def on_polymux_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PolymuxError)
    return answer_error(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return answer_error(from_http(error), headers=dict(error.headers or {}))


def wrap_unexpected(error: BaseException) -> InternalError:
    """A fault of ours: the log gets the traceback, the user a plain sentence without internals."""
    logger.error("unexpected failure while answering", exc_info=error)
    return InternalError("the server failed to answer this request; its log says why")
