"""`GET /v1/models` and `GET /v1/models/{model}`: what is served, under which names, with which facts."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from polymux.gateway.answering import encode_model
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.schemas.models import ModelCard, ModelList
from polymux.gateway.state import Gateway, gateway_of


async def list_models(request: Request) -> ASGIApp:
    gateway = gateway_of(request)
    cards = []
    for name in gateway.service.names():
        aliases = gateway.service.find(name).aliases
        cards += [_card(gateway, each) for each in (name, *aliases)]
    return Response(encode_model(ModelList(data=cards)), media_type="application/json")


async def show_model(request: Request) -> ASGIApp:
    gateway = gateway_of(request)
    return Response(encode_model(_card(gateway, request.path_params["model"])), media_type="application/json")


def _card(gateway: Gateway, name: str) -> ModelCard:
    served = gateway.service.find(name)
    return ModelCard(
        id=name,
        created=gateway.started,
        tasks=list(served.tasks),
        alias_of=served.name if name != served.name else None,
        facts=served.describe(),
    )


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/v1/models",
        summary="The served models and their aliases",
        tag="models",
        handle=list_models,
        response=ModelList,
    ),
    Endpoint(
        method="GET",
        path="/v1/models/{model:path}",
        summary="One served model",
        tag="models",
        handle=show_model,
        response=ModelCard,
    ),
)
