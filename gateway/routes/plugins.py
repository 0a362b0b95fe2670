"""`GET /v1/plugins`: every plugin that was found, how it fares, and why one of them is left out."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from polymux.gateway.answering import encode_model
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.schemas.plugins import PluginCard, PluginList
from polymux.gateway.state import gateway_of


async def list_plugins(request: Request) -> ASGIApp:
    cards = [PluginCard.model_validate(facts) for facts in gateway_of(request).plugins.describe()]
    return Response(encode_model(PluginList(data=cards)), media_type="application/json")


ENDPOINT = Endpoint(
    method="GET",
    path="/v1/plugins",
    summary="The plugins, their state, and the reason where one does not work",
    tag="models",
    handle=list_plugins,
    response=PluginList,
)
