"""`GET /v1/receipts/{request}`: what an answer cost whose body could not say it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from polymux.core.errors import NotFound
from polymux.gateway.answering import encode_model
from polymux.gateway.receipts import KEPT
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.schemas.usage import ReceiptBody, ReceiptEntry, ReceiptList
from polymux.gateway.state import gateway_of


async def show_receipts(request: Request) -> ASGIApp:
    entries = gateway_of(request).receipts.find(request.path_params["request"])
    if not entries:
        raise NotFound(f"no answer of a request with this id has ended, or {KEPT} others have since")
    data = [
        ReceiptEntry(model=entry.model, task=entry.task, receipt=ReceiptBody.of(entry.receipt)) for entry in entries
    ]
    return Response(encode_model(ReceiptList(data=data)), media_type="application/json")


ENDPOINT = Endpoint(
    method="GET",
    path="/v1/receipts/{request:path}",
    summary="What the answers to a request cost, by its x-request-id",
    tag="receipts",
    handle=show_receipts,
    response=ReceiptList,
)
