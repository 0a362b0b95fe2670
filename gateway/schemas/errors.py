"""The one shape of every failure."""

from __future__ import annotations

from polymux.gateway.schemas.base import WireAnswer


class ErrorDetail(WireAnswer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(WireAnswer):
    error: ErrorDetail
