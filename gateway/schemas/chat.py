"""`POST /v1/chat/completions`: the request, the answer and its streamed chunks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from polymux.core.errors import InvalidRequest
from polymux.core.tasks import Chat
from polymux.gateway.schemas.base import MAX_INT, WireAnswer, WireRequest, by_type, choose, maybe, only
from polymux.gateway.schemas.formats import ResponseFormat
from polymux.gateway.schemas.pictures import ImagePart, TextPart, VideoPart, join_words, part_kind
from polymux.gateway.schemas.sampling import SamplingFields
from polymux.gateway.schemas.tools import ToolCall, ToolCallDelta, ToolChoice, ToolDefinition, read_choice
from polymux.gateway.schemas.usage import ReceiptBody, TokenUsage

FUNCTIONS = "is deprecated; use tools"


Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[
        list[
            Annotated[
                Annotated[TextPart, Tag("<words>")]
                | Annotated[ImagePart, Tag("<image>")]
                | Annotated[VideoPart, Tag("<video>")],
                Discriminator(part_kind),
            ]
        ],
        Field(min_length=1, max_length=4096, fail_fast=True),
        Tag("<parts>"),
    ],
    choose(by_type({str: "<text>", list: "<parts>"}), "a string or a list of parts"),
]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

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
    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: list[ToolCall] | None = Field(None, max_length=128, description="Of the assistant.")
    content: Content | None = Field(None, validate_default=True)
    name: str | None = Field(None, max_length=256, description="Reaches the chat template; most ignore it.")
    refusal: Annotated[str | None, only("")] = None
    annotations: Annotated[list[Any] | None, only([])] = None
    audio: Annotated[dict[str, Any] | None, only()] = None
    tool_call_id: str | None = Field(None, max_length=256, description="Which call a tool's message answers.")
    reasoning_content: str | None = Field(None, description="Extension. What the assistant thought.")
    function_call: Annotated[dict[str, Any] | None, only(reason=FUNCTIONS)] = None

    @field_validator("role", mode="before")
    @classmethod
    def _no_functions(cls, value: Any) -> Any:
        if value == "function":
            raise PydanticCustomError("unsupported_parameter", FUNCTIONS)
        return value

    @field_validator("tool_calls")
    @classmethod
    def _only_the_assistant_calls(cls, value: list[ToolCall] | None, info: ValidationInfo) -> list[ToolCall] | None:
        if value and info.data.get("role") != "assistant":
            raise ValueError("only the assistant calls tools")
        return value

    @field_validator("content")
    @classmethod
    def _the_assistant_shows_nothing(cls, value: Content | None, info: ValidationInfo) -> Content | None:
        shown = not isinstance(value, str | None) and any(not isinstance(part, TextPart) for part in value)
        if shown and info.data.get("role") == "assistant":
            raise ValueError("the assistant sends text parts only")
        return value

    @field_validator("content")
    @classmethod
    def _only_calls_need_no_words(cls, value: Content | None, info: ValidationInfo) -> Content | None:
        if value is None and not info.data.get("tool_calls"):
            raise ValueError("is required")
        return value

    def plain(self) -> dict[str, Any]:
        """As chat templates want it: text parts are joined where there is nothing else."""
        content: Any = self.content
        if content is not None and not isinstance(content, str):
            content = join_words([part.plain() for part in content])
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        extras = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content}
        return message | {key: value for key, value in extras.items() if value is not None}


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
    tools: list[ToolDefinition] | None = Field(None, max_length=128)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="Default true.")
    functions: Annotated[list[Any] | None, only([], reason=FUNCTIONS)] = None
    function_call: Annotated[Any, only("none", "auto", reason=FUNCTIONS)] = None
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    reasoning_effort: Effort | None = Field(None, description="Set in the chat template, for models that have it.")
    thinking_budget: int | None = Field(None, ge=0, le=MAX_INT, description="Extension. Tokens of one thought.")
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
        choice, tool = read_choice(self.tool_choice, self.tools)
        if self.parallel_tool_calls is not None and not self.tools:
            raise InvalidRequest(
                "'parallel_tool_calls' needs 'tools'", param="parallel_tool_calls", code="invalid_value"
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
            tools=[tool.plain() for tool in self.tools] if self.tools else None,
            tool_choice=choice,
            tool=tool,
            parallel_calls=self.parallel_tool_calls is not False,
            effort=self.reasoning_effort,
            thought_budget=self.thinking_budget,
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
    content: str | None
    refusal: None = None
    reasoning_content: str | None = maybe("Extension. What the model thought before it answered.")
    tool_calls: list[ToolCall] | None = maybe()


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
    reasoning_content: str | None = maybe()
    tool_calls: list[ToolCallDelta] | None = maybe()


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
