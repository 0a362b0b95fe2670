"""`POST /v1/embeddings`."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
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
    shape = choose_shape(body.output_dtype or "float", packed=body.encoding_format == "base64")
    return WholeResponse(call, WholeEmbeddings(call.model, len(ask.inputs), shape))


Shape = Callable[[bytes], Any]

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

    def __init__(self, model: str, inputs: int, shape: Shape) -> None:
        self.model = model
        self.items = [msgspec.Raw()] * inputs
        self.shape = shape

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


def choose_shape(dtype: str, *, packed: bool) -> Shape:
    """How a vector of little-endian float32 is written: as a list of numbers, or in base64 when `packed`."""
    if dtype == "float":
        return encode_base64 if packed else list_floats
    quantize = QUANTIZERS[dtype]
    return (lambda vector: encode_base64(quantize(vector).tobytes())) if packed else (lambda v: quantize(v).tolist())


def list_floats(vector: bytes) -> list[float]:
    """A value that is not finite becomes null when encoded."""
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


def encode_base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()


def _scale(vector: bytes) -> NDArray[np.int8]:
    """A unit vector's values, from -1 to 1, as -127 to 127."""
    return np.rint(np.frombuffer(vector, "<f4") * 127).clip(-127, 127).astype(np.int8)


def _sign(vector: bytes) -> NDArray[np.uint8]:
    """A bit per value, the first the highest of its byte; the last byte is filled with zeros."""
    return np.packbits(np.frombuffer(vector, "<f4") > 0)


QUANTIZERS: dict[str, Callable[[bytes], NDArray[Any]]] = {
    "int8": _scale,
    "uint8": lambda vector: (_scale(vector).astype(np.int16) + 128).astype(np.uint8),
    "binary": lambda vector: (_sign(vector).astype(np.int16) - 128).astype(np.int8),
    "ubinary": _sign,
}
"""As sentence-transformers names them; a signed byte is the unsigned one less 128."""
