"""`POST /v1/embeddings`."""

from __future__ import annotations

import base64
import struct

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from polymux.core.tasks import Done, Vector
from polymux.gateway.answering import WholeResponse
from polymux.gateway.bodies import read_request
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.routes.opening import open_call
from polymux.gateway.schemas.embeddings import EmbeddingList, EmbeddingRequest
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
    """Collects the vectors, whatever order they come in.

    Each is encoded as it arrives: encoding a few thousand of them at the end would hold up everybody else.
    """

    def __init__(self, model: str, inputs: int, encoding: str) -> None:
        self.model = model
        self.items = [msgspec.Raw()] * inputs
        self.shape = {"float": list_floats, "base64": encode_base64}[encoding]

    def add(self, answer: msgspec.Struct) -> None:
        if isinstance(answer, Vector):
            item = {"object": "embedding", "index": answer.index, "embedding": self.shape(answer.data)}
            self.items[answer.index] = msgspec.Raw(msgspec.json.encode(item))

    def finish(self, done: Done) -> bytes:
        """The shape of `EmbeddingList`."""
        tokens = done.usage.input_tokens
        return msgspec.json.encode(
            {
                "object": "list",
                "model": self.model,
                "data": self.items,
                "usage": InputUsage(prompt_tokens=tokens, total_tokens=tokens).model_dump(),
                "receipt": ReceiptBody.of(done.receipt).model_dump(),
            }
        )


def list_floats(vector: bytes) -> list[float]:
    """A value that is not finite becomes null when encoded."""
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


def encode_base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()
