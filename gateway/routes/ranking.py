"""`POST /v1/rerank` (with the paths that clients of other rerankers use) and `POST /v1/score`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from polymux.core.tasks import Done, Score
from polymux.gateway.answering import WholeResponse, encode_model
from polymux.gateway.bodies import read_request
from polymux.gateway.ids import draw_id
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.routes.opening import open_call
from polymux.gateway.schemas.ranking import (
    RankedDocument,
    RankedResult,
    RerankAnswer,
    RerankRequest,
    ScoreAnswer,
    ScoreItem,
    ScoreRequest,
)
from polymux.gateway.schemas.usage import InputUsage, ReceiptBody
from polymux.gateway.state import gateway_of


async def rerank_documents(request: Request) -> ASGIApp:
    body = await read_request(request, RerankRequest, gateway_of(request).settings.max_body_bytes)
    ask = body.ask()
    call = open_call(request, body.model, "rank", ask, weight=len(ask.pairs))
    texts = body.texts() if body.return_documents is not False else None
    return WholeResponse(call, WholeRanking(call.model, body.top_n, texts))


async def score_texts(request: Request) -> ASGIApp:
    body = await read_request(request, ScoreRequest, gateway_of(request).settings.max_body_bytes)
    ask = body.ask()
    call = open_call(request, body.model, "rank", ask, weight=len(ask.pairs))
    return WholeResponse(call, WholeScores(call.model))


ENDPOINTS = [
    Endpoint(
        method="POST",
        path=path,
        summary="Order documents by how well they answer a query",
        tag="text",
        handle=rerank_documents,
        request=RerankRequest,
        response=RerankAnswer,
    )
    for path in ("/v1/rerank", "/rerank", "/v2/rerank")
]
ENDPOINTS += [
    Endpoint(
        method="POST",
        path="/v1/score",
        summary="Score pairs of texts",
        tag="text",
        handle=score_texts,
        request=ScoreRequest,
        response=ScoreAnswer,
    )
]


class WholeScores:
    """Collects the scores, whatever order they come in."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.scores: dict[int, float] = {}

    def add(self, answer: msgspec.Struct) -> None:
        if isinstance(answer, Score):
            self.scores[answer.index] = answer.score

    def finish(self, done: Done) -> bytes:
        tokens = done.usage.input_tokens
        return encode_model(
            ScoreAnswer(
                id=f"score-{draw_id()}",
                model=self.model,
                data=[ScoreItem(index=index, score=score) for index, score in sorted(self.scores.items())],
                usage=InputUsage(prompt_tokens=tokens, total_tokens=tokens),
                receipt=ReceiptBody.of(done.receipt),
            )
        )


class WholeRanking(WholeScores):
    """The best first, at most `top`; equal ones in their own order."""

    def __init__(self, model: str, top: int | None, texts: list[str] | None) -> None:
        super().__init__(model)
        self.top = top
        self.texts = texts

    def finish(self, done: Done) -> bytes:
        order = sorted(self.scores, key=lambda index: (-self.scores[index], index))
        results = [
            RankedResult(
                index=index,
                relevance_score=self.scores[index],
                document=RankedDocument(text=self.texts[index]) if self.texts is not None else None,
            )
            for index in order[: self.top]
        ]
        tokens = done.usage.input_tokens
        return encode_model(
            RerankAnswer(
                id=f"rerank-{draw_id()}",
                model=self.model,
                results=results,
                usage=InputUsage(prompt_tokens=tokens, total_tokens=tokens),
                receipt=ReceiptBody.of(done.receipt),
            )
        )
