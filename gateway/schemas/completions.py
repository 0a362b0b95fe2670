"""`POST /v1/completions`: the request, the answer and its streamed chunks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, PlainValidator, Tag

from polymux.core.errors import InvalidRequest
from polymux.core.tasks import Complete
from polymux.gateway.schemas.base import MAX_INT, TokenId, WireAnswer, choose, maybe, only
from polymux.gateway.schemas.chat import check_stream_options
from polymux.gateway.schemas.sampling import NonEmpty, SamplingFields
from polymux.gateway.schemas.usage import ReceiptBody, TokenUsage

MAX_INPUTS = 2048
MAX_CHOICES = 2048
"""Prompts times n of one request."""


BOUNDS = msgspec.Meta(ge=0, le=MAX_INT)


def _check_token_ids(value: Any) -> list[int]:
    try:
        ids: list[int] = msgspec.convert(value, Annotated[list[Annotated[int, BOUNDS]], msgspec.Meta(min_length=1)])
        return ids
    except msgspec.ValidationError as error:
        raise ValueError(f"must be token ids, integers from 0 to {MAX_INT}, and not empty: {error}") from None


TokenIds = Annotated[
    list[int],
    PlainValidator(_check_token_ids, json_schema_input_type=Annotated[list[TokenId], Field(min_length=1)]),
]
"""Checked by msgspec: a million of them in 15 ms, where pydantic would hold the event loop for a fifth of a second."""


def _input_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if isinstance(value, list) and value:
        return {str: "<texts>", int: "<tokens>", list: "<token lists>"}.get(type(value[0]))
    return None


TextsOrTokens = Annotated[
    Annotated[NonEmpty, Tag("<text>")]
    | Annotated[list[NonEmpty], Field(max_length=MAX_INPUTS, fail_fast=True), Tag("<texts>")]
    | Annotated[TokenIds, Tag("<tokens>")]
    | Annotated[list[TokenIds], Field(max_length=MAX_INPUTS, fail_fast=True), Tag("<token lists>")],
    choose(
        _input_kind,
        "a string, a list of strings, a list of token ids or a list of lists of token ids, and not empty",
    ),
]


def list_inputs(value: Any) -> list[str | list[int]]:
    """One entry per prompt or input, whatever of the four shapes the client chose."""
    if isinstance(value, str) or isinstance(value[0], int):
        return [value]
    return list(value)


class CompletionRequest(SamplingFields):
    model: str
    prompt: TextsOrTokens
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT, description="Default 16.")
    logprobs: int | None = Field(None, ge=0, le=20, description="Alternatives per token; 0: the chosen token only.")
    echo: bool | None = Field(None, description="Begin with the prompt.")
    best_of: Annotated[int | None, only(1)] = None
    suffix: Annotated[str | None, only("")] = None

    def ask(self) -> Complete:
        """The task's own Struct. Raises `InvalidRequest` where two fields contradict each other."""
        check_stream_options(self)
        prompts = list_inputs(self.prompt)
        n = self.n or 1
        if len(prompts) * n > MAX_CHOICES:
            raise InvalidRequest(f"prompts times n must not exceed {MAX_CHOICES}", param="n", code="invalid_value")
        return Complete(
            prompts=prompts,
            sampling=self.sampling(),
            n=n,
            max_tokens=16 if self.max_tokens is None else self.max_tokens,
            stop=self.stops(),
            stop_token_ids=self.stop_token_ids or [],
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.logprobs,
            echo=bool(self.echo),
            format=self.format(),
        )


class CompletionLogprobs(WireAnswer):
    """Four lists of equal length. The first token of an echoed prompt has no logprob."""

    tokens: list[str] = Field(default_factory=list)
    token_logprobs: list[float | None] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = Field(default_factory=list)
    text_offset: list[int] = Field(default_factory=list)


class CompletionChoice(WireAnswer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(WireAnswer):
    """Streamed chunks have the same shape; usage and receipt then come as in chat."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage | None = maybe()
    receipt: ReceiptBody | None = maybe()
