"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from polymux.core.tasks import CallDelta, ChoiceEnded, Done, TextDelta, ThoughtDelta, TokenLogprob
from polymux.gateway.answering import StreamResponse, WholeResponse, encode_model, frame_model
from polymux.gateway.bodies import read_request
from polymux.gateway.ids import draw_id
from polymux.gateway.routes.choices import ChoiceFrames
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.routes.opening import open_call
from polymux.gateway.schemas.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatRequest,
    ContentLogprob,
    TopLogprob,
)
from polymux.gateway.schemas.tools import ToolCall, ToolCallDelta, collect_call
from polymux.gateway.schemas.usage import ReceiptBody, TokenUsage
from polymux.gateway.state import gateway_of


async def complete_chat(request: Request) -> ASGIApp:
    body = await read_request(request, ChatRequest, gateway_of(request).settings.max_body_bytes)
    ask = body.ask()
    call = open_call(request, body.model, "chat", ask, weight=ask.n)
    if body.stream:
        return StreamResponse(call, ChatStream(call.model, ask.n, body.wants_usage))
    return WholeResponse(call, WholeChat(call.model, ask.n, ask.logprobs is not None))


ENDPOINT = Endpoint(
    method="POST",
    path="/v1/chat/completions",
    summary="Continue a conversation",
    tag="text",
    handle=complete_chat,
    request=ChatRequest,
    response=ChatCompletion,
    stream=ChatCompletionChunk,
)


class WholeChat:
    """Collects n choices."""

    def __init__(self, model: str, n: int, wants_logprobs: bool) -> None:
        self.model = model
        self.texts: list[list[str]] = [[] for _ in range(n)]
        self.thoughts: list[list[str]] = [[] for _ in range(n)]
        self.calls: list[list[ToolCall]] = [[] for _ in range(n)]
        self.logprobs: list[list[ContentLogprob]] = [[] for _ in range(n)]
        self.wants_logprobs = wants_logprobs
        self.reasons: list[str] = ["stop"] * n

    def add(self, answer: msgspec.Struct) -> None:
        if isinstance(answer, ChoiceEnded):
            self.reasons[answer.index] = answer.reason
            return
        if not isinstance(answer, TextDelta | ThoughtDelta | CallDelta):
            return
        self.logprobs[answer.index] += map(shape_token, answer.logprobs or ())
        if isinstance(answer, TextDelta):
            self.texts[answer.index].append(answer.text)
        elif isinstance(answer, ThoughtDelta):
            self.thoughts[answer.index].append(answer.text)
        else:
            collect_call(self.calls[answer.index], answer)

    def message(self, index: int) -> AnswerMessage:
        """Content is null when tools were called and nothing was said."""
        calls, text = self.calls[index], "".join(self.texts[index])
        return AnswerMessage(
            content=None if calls and not text else text,
            reasoning_content="".join(self.thoughts[index]) or None,
            tool_calls=calls or None,
        )

    def finish(self, done: Done) -> bytes:
        choices = [
            ChatChoice(
                index=index,
                message=self.message(index),
                logprobs=ChatLogprobs(content=self.logprobs[index]) if self.wants_logprobs else None,
                finish_reason=self.reasons[index],
            )
            for index in range(len(self.texts))
        ]
        return encode_model(
            ChatCompletion(
                id=f"chatcmpl-{draw_id()}",
                created=int(time.time()),
                model=self.model,
                choices=choices,
                usage=TokenUsage.of(done.usage),
                receipt=ReceiptBody.of(done.receipt),
            )
        )


class ChatStream(ChoiceFrames[ChatCompletionChunk]):
    """Chunks: per choice one with the role, one per delta, one with the reason; then usage, if asked for."""

    def __init__(self, model: str, n: int, wants_usage: bool) -> None:
        super().__init__(ChatCompletionChunk, "chatcmpl", model, wants_usage)
        self._greeted = [False] * n

    def write(self, answer: msgspec.Struct) -> bytes:
        if isinstance(answer, Done):
            return self.end(answer)
        frames = self.release()
        if isinstance(answer, TextDelta | ThoughtDelta | CallDelta):
            frames += self._greet(answer.index)
            delta = shape_delta(answer)
            if delta is not None:
                frames += frame_model(self._chunk(answer.index, delta, shape_logprobs(answer.logprobs)))
        elif isinstance(answer, ChoiceEnded):
            frames += self._greet(answer.index)
            self.hold(self._chunk(answer.index, ChatDelta(), reason=answer.reason))
        return frames

    def _greet(self, index: int) -> bytes:
        if self._greeted[index]:
            return b""
        self._greeted[index] = True
        return frame_model(self._chunk(index, ChatDelta(role="assistant", content="")))

    def _chunk(
        self, index: int, delta: ChatDelta, logprobs: ChatLogprobs | None = None, reason: str | None = None
    ) -> ChatCompletionChunk:
        return self.make(ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=reason))


def shape_delta(answer: TextDelta | ThoughtDelta | CallDelta) -> ChatDelta | None:
    """None when there is nothing to tell."""
    if isinstance(answer, CallDelta):
        return ChatDelta(tool_calls=[ToolCallDelta.of(answer)])
    if not answer.text and not answer.logprobs:
        return None
    return ChatDelta(content=answer.text) if isinstance(answer, TextDelta) else ChatDelta(reasoning_content=answer.text)


def shape_logprobs(tokens: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
    """Chat's own shape: one entry per token, its alternatives inside."""
    return None if tokens is None else ChatLogprobs(content=[shape_token(each) for each in tokens])


def shape_token(token: TokenLogprob) -> ContentLogprob:
    others = [TopLogprob(token=each.token, logprob=each.logprob, bytes=list(each.data)) for each in token.top]
    return ContentLogprob(token=token.token, logprob=token.logprob, bytes=list(token.data), top_logprobs=others)
