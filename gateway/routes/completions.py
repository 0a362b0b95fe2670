"""`POST /v1/completions`."""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from polymux.core.tasks import ChoiceEnded, Done, TextDelta, TokenLogprob
from polymux.gateway.answering import StreamResponse, WholeResponse, encode_model, frame_model
from polymux.gateway.bodies import read_request
from polymux.gateway.ids import draw_id
from polymux.gateway.routes.choices import ChoiceFrames
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.routes.opening import open_call
from polymux.gateway.schemas.completions import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from polymux.gateway.schemas.usage import ReceiptBody, TokenUsage
from polymux.gateway.state import gateway_of


async def complete_text(request: Request) -> ASGIApp:
    body = await read_request(request, CompletionRequest, gateway_of(request).settings.max_body_bytes)
    ask = body.ask()
    choices = len(ask.prompts) * ask.n
    call = open_call(request, body.model, "complete", ask, weight=choices)
    if body.stream:
        return StreamResponse(call, CompletionStream(call.model, choices, ask.logprobs, body.wants_usage))
    return WholeResponse(call, WholeCompletion(call.model, choices, ask.logprobs))


ENDPOINT = Endpoint(
    method="POST",
    path="/v1/completions",
    summary="Continue texts or token ids",
    tag="text",
    handle=complete_text,
    request=CompletionRequest,
    response=Completion,
    stream=Completion,
)


class WholeCompletion:
    """Collects the choices; choice i*n + j is continuation j of prompt i."""

    def __init__(self, model: str, choices: int, logprobs: int | None) -> None:
        self.model = model
        self.texts: list[list[str]] = [[] for _ in range(choices)]
        self.reasons: list[str] = ["stop"] * choices
        self.logprobs = [LogprobLists(logprobs) for _ in range(choices)] if logprobs is not None else None

    def add(self, answer: msgspec.Struct) -> None:
        if isinstance(answer, TextDelta):
            self.texts[answer.index].append(answer.text)
            if self.logprobs is not None:
                self.logprobs[answer.index].extend(answer.logprobs or ())
        elif isinstance(answer, ChoiceEnded):
            self.reasons[answer.index] = answer.reason

    def finish(self, done: Done) -> bytes:
        choices = []
        for index, texts in enumerate(self.texts):
            logprobs = None if self.logprobs is None else self.logprobs[index].take()
            reason = self.reasons[index]
            choices.append(CompletionChoice(index=index, text="".join(texts), logprobs=logprobs, finish_reason=reason))
        return encode_model(
            Completion(
                id=f"cmpl-{draw_id()}",
                created=int(time.time()),
                model=self.model,
                choices=choices,
                usage=TokenUsage.of(done.usage),
                receipt=ReceiptBody.of(done.receipt),
            )
        )


class CompletionStream(ChoiceFrames[Completion]):
    """One chunk per delta, one with the reason per choice; then usage, if asked for."""

    def __init__(self, model: str, choices: int, logprobs: int | None, wants_usage: bool) -> None:
        super().__init__(Completion, "cmpl", model, wants_usage)
        self._logprobs = [LogprobLists(logprobs) for _ in range(choices)] if logprobs is not None else None

    def write(self, answer: msgspec.Struct) -> bytes:
        if isinstance(answer, Done):
            return self.end(answer)
        frames = self.release()
        if isinstance(answer, TextDelta) and (answer.text or answer.logprobs):
            logprobs = None
            if self._logprobs is not None:
                lists = self._logprobs[answer.index]
                lists.extend(answer.logprobs or ())
                logprobs = lists.take()
            frames += frame_model(self._chunk(answer.index, answer.text, logprobs))
        elif isinstance(answer, ChoiceEnded):
            self.hold(self._chunk(answer.index, "", reason=answer.reason))
        return frames

    def _chunk(
        self, index: int, text: str, logprobs: CompletionLogprobs | None = None, reason: str | None = None
    ) -> Completion:
        return self.make(CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason))


class LogprobLists:
    """This endpoint's own shape of one choice's logprobs, filled token by token.

    `text_offset` is where a token begins in the choice's text, counted in characters that are complete.
    """

    def __init__(self, top: int) -> None:
        self.top = top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0
        self._lists = CompletionLogprobs()

    def extend(self, tokens: Sequence[TokenLogprob]) -> None:
        lists = self._lists
        for each in tokens:
            lists.tokens.append(name_token(each))
            lists.token_logprobs.append(finite(each.logprob))
            lists.top_logprobs.append(_alternatives(each, self.top))
            lists.text_offset.append(self._length)
            self._length += len(self._decoder.decode(each.data)) if each.data else len(each.token)

    def take(self) -> CompletionLogprobs:
        """What came since the last time."""
        lists, self._lists = self._lists, CompletionLogprobs()
        return lists


def _alternatives(token: TokenLogprob, top: int) -> dict[str, float] | None:
    """The chosen token is among them always, as the protocol says."""
    if not math.isfinite(token.logprob):
        return None
    named = {name_token(other): other.logprob for other in token.top[:top]}
    return {**named, name_token(token): token.logprob}


def finite(logprob: float) -> float | None:
    """None for the first token of an echoed prompt, which nothing came before."""
    return logprob if math.isfinite(logprob) else None


def name_token(token: TokenLogprob) -> str:
    """Its text; a part of a character is named by its bytes, so that two parts stay two."""
    try:
        token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)
    return token.token
