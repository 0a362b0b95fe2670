"""`POST /v1/chat/completions`: the request, the answer and its streamed chunks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag, field_validator
from pydantic_core import PydanticCustomError

from polymux.core.errors import InvalidRequest
from polymux.core.tasks import Chat
from polymux.gateway.schemas.base import MAX_INT, WireAnswer, WireRequest, by_type, choose, maybe, only
from polymux.gateway.schemas.formats import ResponseFormat
from polymux.gateway.schemas.sampling import SamplingFields
from polymux.gateway.schemas.usage import ReceiptBody, TokenUsage

TOOLS = "tools are not served yet"


class TextPart(WireRequest):
    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        if value in ("image_url", "input_audio", "file", "video_url", "refusal"):
            raise PydanticCustomError("unsupported_parameter", "this model takes text parts only")
        return value


Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[TextPart], Field(min_length=1, max_length=4096, fail_fast=True), Tag("<parts>")],
    choose(by_type({str: "<text>", list: "<parts>"}), "a string or a list of parts"),
]

Scalar = Annotated[
    Annotated[bool, Tag("<flag>")]
    | Annotated[int, Tag("<whole>")]
    | Annotated[float, Tag("<real>")]
    | Annotated[str, Tag("<text>")],
    choose(
        by_type({bool: "<flag>", int: "<whole>", float: "<real>", str: "<text>"}), "a boolean, a number or a string"
    ),
]


class Message(WireRequest):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = Field(None, max_length=256, description="Reaches the chat template; most ignore it.")
    refusal: Annotated[str | None, only("")] = None
    annotations: Annotated[list[Any] | None, only([])] = None
    audio: Annotated[dict[str, Any] | None, only()] = None
    tool_calls: Annotated[list[Any] | None, only([], reason=TOOLS)] = None
    function_call: Annotated[dict[str, Any] | None, only(reason=TOOLS)] = None

    @field_validator("role", mode="before")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        if value in ("tool", "function"):
            raise PydanticCustomError("unsupported_parameter", TOOLS)
        return value

    def plain(self) -> dict[str, Any]:
        """As chat templates want it: text parts are joined."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        message = {"role": self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}


class ChatRequest(SamplingFields):
    model: str
    messages: list[Message] = Field(min_length=1, max_length=4096, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT, description="The older name of max_completion_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Needs `logprobs`.")
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Scalar] | None = Field(
        None, max_length=32, description="Extension. Variables for the chat template."
    )
    safety_identifier: str | None = Field(None, description="Accepted; changes nothing.")
    prompt_cache_key: str | None = Field(None, description="Accepted; prompts are cached by content.")
    prompt_cache_retention: str | None = Field(None, description="Accepted; changes nothing.")
    store: Annotated[bool | None, only(False, reason="nothing is stored here")] = None
    modalities: Annotated[list[str] | None, only(["text"], reason="this endpoint answers text only")] = None
    tools: Annotated[list[Any] | None, only([], reason=TOOLS)] = None
    tool_choice: Annotated[Any, only("none", "auto", reason=TOOLS)] = None
    parallel_tool_calls: Annotated[bool | None, only(reason="is allowed together with tools only")] = None
    functions: Annotated[list[Any] | None, only([], reason=TOOLS)] = None
    function_call: Annotated[Any, only("none", "auto", reason=TOOLS)] = None
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    reasoning_effort: Annotated[Any, only()] = None
    verbosity: Annotated[Any, only("medium")] = None
    web_search_options: Annotated[Any, only()] = None

    def ask(self) -> Chat:
        """The task's own Struct. Raises `InvalidRequest` where two fields contradict each other."""
        check_stream_options(self)
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("'top_logprobs' needs 'logprobs': true", param="top_logprobs", code="invalid_value")
        limit = self.max_completion_tokens
        if limit is None:
            limit = self.max_tokens
        elif self.max_tokens not in (None, limit):
            raise InvalidRequest(
                "'max_tokens' and 'max_completion_tokens' differ", param="max_tokens", code="invalid_value"
            )
        return Chat(
            messages=[message.plain() for message in self.messages],
            sampling=self.sampling(),
            n=self.n or 1,
            max_tokens=limit,
            stop=self.stops(),
            stop_token_ids=self.stop_token_ids or [],
            ignore_eos=bool(self.ignore_eos),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            template_options=dict(self.chat_template_kwargs or {}),
            format=self.format(self.response_format),
        )


def check_stream_options(request: SamplingFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest(
            "'stream_options' is allowed with 'stream': true only", param="stream_options", code="invalid_value"
        )


class TopLogprob(WireAnswer):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(WireAnswer):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(WireAnswer):
    content: list[ContentLogprob]
    refusal: None = None


class AnswerMessage(WireAnswer):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(WireAnswer):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(WireAnswer):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    receipt: ReceiptBody


class ChatDelta(WireAnswer):
    role: Literal["assistant"] | None = maybe()
    content: str | None = maybe()


class ChatChunkChoice(WireAnswer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletionChunk(WireAnswer):
    """The last chunk carries the receipt; the usage comes in a last chunk without choices, if asked for."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: TokenUsage | None = maybe()
    receipt: ReceiptBody | None = maybe()
