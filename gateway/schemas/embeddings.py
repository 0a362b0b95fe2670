"""`POST /v1/embeddings`: the request and the answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from polymux.core.tasks import Embed
from polymux.gateway.schemas.base import WireAnswer, WireRequest
from polymux.gateway.schemas.completions import MAX_INPUTS, TextsOrTokens, list_inputs
from polymux.gateway.schemas.pictures import ImagePart, TextPart, part_kind
from polymux.gateway.schemas.sampling import NonEmpty
from polymux.gateway.schemas.usage import InputUsage, ReceiptBody


def _part_kind(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else part_kind(value)


Part = Annotated[
    Annotated[NonEmpty, Tag("<text>")] | Annotated[TextPart, Tag("<words>")] | Annotated[ImagePart, Tag("<image>")],
    Discriminator(_part_kind),
]


def _kind(value: Any) -> str:
    """Objects are parts, as chats carry them; texts may stand among them. Everything else is told what it should be."""
    parts = isinstance(value, list) and any(isinstance(each, dict) for each in value[: MAX_INPUTS + 1])
    return "<parts>" if parts else "<texts>"


Inputs = Annotated[
    Annotated[TextsOrTokens, Tag("<texts>")]
    | Annotated[list[Part], Field(max_length=MAX_INPUTS, fail_fast=True), Tag("<parts>")],
    Discriminator(_kind),
]
"""Pictures are extensions."""


class EmbeddingRequest(WireRequest):
    model: str
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: little-endian float32. Default float."
    )
    output_dtype: Literal["float", "int8", "uint8", "binary", "ubinary"] | None = Field(
        None,
        description="Extension. int8: values times 127; binary: the signs, eight to a byte. As integers, or in base64.",
    )
    prompt_name: str | None = Field(
        None, max_length=64, description="Extension. Which of the model's own prompts comes before every text."
    )
    dimensions: int | None = Field(None, ge=1, le=65536, description="Keep the first so many and normalise again.")
    truncate: bool | None = Field(None, description="Extension. Cut inputs that are too long instead of refusing them.")
    user: str | None = Field(None, description="Accepted; changes nothing.")

    def ask(self) -> Embed:
        return Embed(
            inputs=list_parts(self.input),
            dimensions=self.dimensions,
            truncate=bool(self.truncate),
            prompt=self.prompt_name,
        )


def list_parts(value: Any) -> list[str | list[int] | dict[str, Any]]:
    """One entry per input."""
    return [each.plain() if isinstance(each, TextPart | ImagePart) else each for each in list_inputs(value)]


class Embedding(WireAnswer):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | list[int] | str


class EmbeddingList(WireAnswer):
    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: InputUsage
    receipt: ReceiptBody
