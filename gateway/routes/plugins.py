"""`GET /v1/plugins`: every plugin that was found, how it fares, and why one of them is left out."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from polymux.core.vocabulary import Complaint
from polymux.gateway.answering import encode_model
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.schemas.plugins import PluginCard, PluginList
from polymux.gateway.state import gateway_of


async def list_plugins(request: Request) -> ASGIApp:
    gateway = gateway_of(request)
    cards = [PluginCard.model_validate(facts) for facts in gateway.plugins.describe()]
    for engine in gateway.service.engines:
        for card in cards:
            if (complaint := engine.plugins.get(card.name)) is not None:
                add_complaint(card, complaint)
    return Response(encode_model(PluginList(data=cards)), media_type="application/json")


def add_complaint(card: PluginCard, complaint: Complaint) -> None:
    """A plugin lives in the engine too, and may break there alone: hooks that are called only there, and its models."""
    card.notes += [f"in the engine: {note}" for note in complaint.notes if note not in card.notes]
    if complaint.fault is not None and card.status == "enabled":
        card.status, card.reason = "failed", f"in the engine: {complaint.fault}"


ENDPOINT = Endpoint(
    method="GET",
    path="/v1/plugins",
    summary="The plugins, their state, and the reason where one does not work",
    tag="models",
    handle=list_plugins,
    response=PluginList,
)
