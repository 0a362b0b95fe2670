"""Request bodies: bounded while they arrive, strict JSON, then the endpoint's own schema."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from polymux.core.errors import InvalidRequest, TooLarge, UnsupportedMedia
from polymux.gateway.errors import explain_validation

MAX_NESTED = 100_000
"""Objects and arrays in one body. A body of nothing but brackets would hold the event loop for half a second."""

Schema = TypeVar("Schema", bound=BaseModel)


async def read_json(request: Request, limit: int) -> Any:
    """The decoded body. NaN, Infinity, lone surrogates and bombs of depth are refused like any malformed JSON.

    Raises `UnsupportedMedia`, `TooLarge`, `InvalidRequest`.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise UnsupportedMedia(f"content-type must be application/json, not {media or 'absent'!r}")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("a compressed body is not accepted here")
    body = await read_body(request, limit)
    if body.count(b"[") + body.count(b"{") > MAX_NESTED:
        raise InvalidRequest(f"the body holds more than {MAX_NESTED} objects and arrays", code="invalid_json")
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None


async def read_body(request: Request, limit: int) -> bytes:
    """All bytes of the body; stops reading, and keeps nothing, as soon as they exceed `limit`."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


async def read_request(request: Request, schema: type[Schema], limit: int) -> Schema:
    """The body as `schema`. Raises `InvalidRequest` whose `param` is the path of the offending field."""
    data = await read_json(request, limit)
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return check_request(data, schema)


def check_request(data: Any, schema: type[Schema]) -> Schema:
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise explain_validation(error) from None


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body exceeds the limit of {limit} bytes")
