"""`POST /tokenize` and `POST /detokenize`: a model's tokens, without its engine."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from polymux.core.errors import InternalError
from polymux.core.tasks import Detokenized, Done, Tokenized
from polymux.gateway.answering import WholeResponse, encode_model
from polymux.gateway.bodies import read_request
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.routes.opening import open_call
from polymux.gateway.schemas.tokens import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from polymux.gateway.state import gateway_of


async def tokenize(request: Request) -> ASGIApp:
    body = await read_request(request, TokenizeRequest, gateway_of(request).settings.max_body_bytes)
    call = open_call(request, body.model, "tokenize", body.ask(), weight=1)
    return WholeResponse(call, WholeSpelling(named=bool(body.return_token_strs)))


async def detokenize(request: Request) -> ASGIApp:
    body = await read_request(request, DetokenizeRequest, gateway_of(request).settings.max_body_bytes)
    return WholeResponse(open_call(request, body.model, "detokenize", body.ask(), weight=1), WholeSpelling())


ENDPOINTS = [
    Endpoint(
        method="POST",
        path="/tokenize",
        summary="Spell a text or a conversation in the model's tokens",
        tag="text",
        handle=tokenize,
        request=TokenizeRequest,
        response=TokenizeAnswer,
    ),
    Endpoint(
        method="POST",
        path="/detokenize",
        summary="Read the model's tokens as text",
        tag="text",
        handle=detokenize,
        request=DetokenizeRequest,
        response=DetokenizeAnswer,
    ),
]


class WholeSpelling:
    """One answer is the body. `named`: with what each token is called."""

    def __init__(self, *, named: bool = False) -> None:
        self.named = named
        self.answer: msgspec.Struct | None = None

    def add(self, answer: msgspec.Struct) -> None:
        self.answer = answer

    def finish(self, done: Done) -> bytes:
        match self.answer:
            case Tokenized(ids=ids, names=names, longest=longest):
                strings = names if self.named else None
                body = TokenizeAnswer(count=len(ids), max_model_len=longest, tokens=ids, token_strs=strings)
                return encode_model(body)
            case Detokenized(text=text):
                return encode_model(DetokenizeAnswer(prompt=text))
        raise InternalError("the job ended without its answer")
