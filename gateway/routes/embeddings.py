"""`POST /v1/embeddings`."""

from __future__ import annotations

import base64
import struct

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from polymux.core.tasks import Done, Vector
from polymux.gateway.answering import WholeResponse, encode_model
from polymux.gateway.bodies import read_request
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.routes.opening import open_call
from polymux.gateway.schemas.embeddings import Embedding, EmbeddingList, EmbeddingRequest
from polymux.gateway.schemas.usage import InputUsage, ReceiptBody
from polymux.gateway.state import gateway_of


async def embed_inputs(request: Request) -> ASGIApp:
    body = await read_request(request, EmbeddingRequest, gateway_of(request).settings.max_body_bytes)
    ask = body.ask()
    call = open_call(request, body.model, "embed", ask, weight=len(ask.inputs))
    return WholeResponse(call, WholeEmbeddings(call.model, len(ask.inputs), body.encoding_format or "float"))


ENDPOINT = Endpoint(
    method="POST",
    path="/v1/embeddings",
    summary="Embed texts or token ids",
    tag="text",
    handle=embed_inputs,
    request=EmbeddingRequest,
    response=EmbeddingList,
)


class WholeEmbeddings:
    """Collects the vectors, whatever order they come in."""

    def __init__(self, model: str, inputs: int, encoding: str) -> None:
        self.model = model
        self.vectors = [b""] * inputs
        self.encode = {"float": list_floats, "base64": encode_base64}[encoding]

    def add(self, answer: msgspec.Struct) -> None:
        if isinstance(answer, Vector):
            self.vectors[answer.index] = answer.data

    def finish(self, done: Done) -> bytes:
        tokens = done.usage.input_tokens
        return encode_model(
            EmbeddingList(
                model=self.model,
                data=[
                    Embedding(index=index, embedding=self.encode(vector)) for index, vector in enumerate(self.vectors)
                ],
                usage=InputUsage(prompt_tokens=tokens, total_tokens=tokens),
                receipt=ReceiptBody.of(done.receipt),
            )
        )


def list_floats(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


def encode_base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()
