"""`POST /v1/rerank` and `POST /v1/score`: the requests and the answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag

from polymux.core.errors import InvalidRequest
from polymux.core.tasks import Rank
from polymux.gateway.schemas.base import MAX_INT, WireAnswer, WireRequest, by_type, choose, maybe
from polymux.gateway.schemas.completions import MAX_INPUTS
from polymux.gateway.schemas.sampling import NonEmpty
from polymux.gateway.schemas.usage import InputUsage, ReceiptBody


class DocumentBody(WireRequest):
    text: NonEmpty


Document = Annotated[
    Annotated[NonEmpty, Tag("<text>")] | Annotated[DocumentBody, Tag("<object>")],
    choose(by_type({str: "<text>", dict: "<object>"}), "a string or an object with a text"),
]

Texts = Annotated[
    Annotated[NonEmpty, Tag("<one>")]
    | Annotated[list[NonEmpty], Field(min_length=1, max_length=MAX_INPUTS), Tag("<many>")],
    choose(by_type({str: "<one>", list: "<many>"}), "a string or a list of strings"),
]


class RerankRequest(WireRequest):
    model: str
    query: NonEmpty
    documents: list[Document] = Field(min_length=1, max_length=MAX_INPUTS)
    top_n: int | None = Field(None, ge=1, le=MAX_INT, description="How many of the best to return; default all.")
    return_documents: bool | None = Field(None, description="Default true.")
    truncate: bool | None = Field(None, description="Extension. Cut documents that are too long, not refuse them.")

    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]

    def ask(self) -> Rank:
        return Rank(pairs=[(self.query, text) for text in self.texts()], truncate=bool(self.truncate))


class RankedDocument(WireAnswer):
    text: str


class RankedResult(WireAnswer):
    index: int
    relevance_score: float
    document: RankedDocument | None = maybe()


class RerankAnswer(WireAnswer):
    """The best first."""

    id: str
    model: str
    results: list[RankedResult]
    usage: InputUsage
    receipt: ReceiptBody


class ScoreRequest(WireRequest):
    """One text against each of many, or as many against as many, one by one."""

    model: str
    text_1: Texts
    text_2: Texts
    truncate: bool | None = Field(None, description="Extension. Cut second texts that are too long, not refuse them.")

    def ask(self) -> Rank:
        """Raises `InvalidRequest` for lists that do not match."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            message = "'text_1' must be one text, or as many as 'text_2'"
            raise InvalidRequest(message, param="text_1", code="invalid_value")
        return Rank(pairs=list(zip(first, second)), truncate=bool(self.truncate))


class ScoreItem(WireAnswer):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreAnswer(WireAnswer):
    id: str
    object: Literal["list"] = "list"
    model: str
    data: list[ScoreItem]
    usage: InputUsage
    receipt: ReceiptBody
