"""`POST /v1/responses`: the request, and how its items become a conversation. Nothing is stored between requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from polymux.core.errors import InvalidRequest
from polymux.core.tasks import Chat, Format, Sampling
from polymux.gateway.schemas.base import MAX_INT, WireRequest, by_type, choose, only
from polymux.gateway.schemas.chat import Effort, Scalar
from polymux.gateway.schemas.formats import ANY_OBJECT
from polymux.gateway.schemas.pictures import Detail, Url, join_words, write_image
from polymux.gateway.schemas.tools import Name

STATELESS = "is not supported: nothing is stored between requests"


class TextPart(WireRequest):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None

    @field_validator("type", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if value in ("input_file", "input_audio", "refusal"):
            raise PydanticCustomError("unsupported_parameter", "parts are of type input_text or input_image")
        return value

    def plain(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class ImagePart(WireRequest):
    type: Literal["input_image"]
    image_url: Url
    detail: Detail | None = None
    file_id: Annotated[str | None, only(reason=STATELESS)] = None

    def plain(self) -> dict[str, Any]:
        return write_image(self.image_url, self.detail)


def _part_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<image>" if kind == "input_image" else "<words>"


Parts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[
        list[
            Annotated[
                Annotated[TextPart, Tag("<words>")] | Annotated[ImagePart, Tag("<image>")], Discriminator(_part_kind)
            ]
        ],
        Field(max_length=4096, fail_fast=True),
        Tag("<parts>"),
    ],
    choose(by_type({str: "<text>", list: "<parts>"}), "a string or a list of parts"),
]


def join(parts: str | list[TextPart | ImagePart]) -> Any:
    """One text where there is nothing else, otherwise parts as chats carry them."""
    return parts if isinstance(parts, str) else join_words([part.plain() for part in parts])


class ItemFields(WireRequest):
    """An item may come back with all the fields that the client's own types have: those without a value say nothing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value


class MessageItem(ItemFields):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    @field_validator("content")
    @classmethod
    def _the_assistant_shows_nothing(cls, value: Parts, info: ValidationInfo) -> Parts:
        shown = not isinstance(value, str) and any(isinstance(part, ImagePart) for part in value)
        if shown and info.data.get("role") == "assistant":
            raise ValueError("the assistant sends text parts only")
        return value


class CallItem(ItemFields):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=256)
    name: Name
    arguments: str
    id: str | None = None
    status: str | None = None


class CallOutputItem(ItemFields):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=256)
    output: Parts
    id: str | None = None
    status: str | None = None


class ReasoningText(WireRequest):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(ItemFields):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: Annotated[str | None, only("")] = None
    status: str | None = None


def _kind(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if kind in ("message", "function_call", "function_call_output", "reasoning") else None


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(
        _kind,
        custom_error_type="invalid_value",
        custom_error_message="must be a message, a function_call, a function_call_output or a reasoning item",
    ),
]

Input = Annotated[
    Annotated[str, Field(min_length=1), Tag("<text>")]
    | Annotated[list[Item], Field(min_length=1, max_length=4096, fail_fast=True), Tag("<items>")],
    choose(by_type({str: "<text>", list: "<items>"}), "a string or a list of items"),
]


class ResponseTool(WireRequest):
    """A function. Built-in tools are not served."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of type object.")
    strict: bool | None = Field(None, description="Refuse keywords that cannot be guaranteed.")

    @field_validator("type", mode="before")
    @classmethod
    def _only_functions(cls, value: Any) -> Any:
        if value != "function":
            raise PydanticCustomError("unsupported_parameter", "only functions are served as tools")
        return value


class ResponseToolName(WireRequest):
    type: Literal["function"]
    name: Name


ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")] | Annotated[ResponseToolName, Tag("<tool>")],
    choose(by_type({str: "<mode>", dict: "<tool>"}), "none, auto, required or a function"),
]


class ResponseFormatField(WireRequest):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=64)
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    def format(self) -> Format | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Format("schema", ANY_OBJECT)
        if self.schema_ is None:
            raise InvalidRequest("'text.format.schema' is required", param="text.format.schema", code="invalid_value")
        return Format("schema", self.schema_)


class TextSettings(WireRequest):
    format: ResponseFormatField | None = None
    verbosity: Annotated[str | None, only("medium")] = None


class ReasoningSettings(WireRequest):
    effort: Effort | None = None
    summary: Annotated[str | None, only("auto")] = None
    generate_summary: Annotated[str | None, only("auto")] = None


class ResponseStreamOptions(WireRequest):
    include_obfuscation: Annotated[bool | None, only(False)] = None


class ResponseRequest(WireRequest):
    model: str
    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: Annotated[int | None, only(0)] = None
    tools: list[ResponseTool] | None = Field(None, max_length=128)
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="Extension.")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=1024, description="Extension."
    )
    thinking_budget: int | None = Field(None, ge=0, le=MAX_INT, description="Extension. Tokens of one thought.")
    chat_template_kwargs: dict[str, Scalar] | None = Field(None, max_length=32, description="Extension.")
    store: bool | None = Field(None, description="Accepted; nothing is stored, and the answer says so.")
    metadata: dict[str, str] | None = Field(None, description="Sent back as it is.")
    user: str | None = Field(None, description="Accepted; changes nothing.")
    safety_identifier: str | None = Field(None, description="Accepted; changes nothing.")
    prompt_cache_key: str | None = Field(None, description="Accepted; prompts are cached by content.")
    service_tier: str | None = Field(None, description="Accepted; changes nothing: there is one tier.")
    truncation: Annotated[str | None, only("disabled")] = None
    include: Annotated[list[str] | None, only([])] = None
    background: Annotated[bool | None, only(False, reason=STATELESS)] = None
    previous_response_id: Annotated[str | None, only(reason=STATELESS)] = None
    conversation: Annotated[Any, only(reason=STATELESS)] = None
    prompt: Annotated[Any, only(reason=STATELESS)] = None
    max_tool_calls: Annotated[int | None, only()] = None

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if any(not (key.isascii() and key.isdigit() and int(key[:20]) <= MAX_INT) for key in value or ()):
            raise ValueError("keys must be token ids")
        return value

    def ask(self) -> Chat:
        """The task's own Struct. Raises `InvalidRequest` where two fields contradict each other."""
        choice, tool = self._choose()
        options = {} if self.chat_template_kwargs is None else dict(self.chat_template_kwargs)
        tools = [
            {"type": "function", "function": each.model_dump(exclude_none=True, exclude={"type"})}
            for each in self.tools or ()
        ]
        return Chat(
            messages=self.messages(),
            sampling=Sampling(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                seed=self.seed,
                logit_bias={int(key): bias for key, bias in (self.logit_bias or {}).items()},
            ),
            max_tokens=self.max_output_tokens,
            tools=tools or None,
            tool_choice=choice,
            tool=tool,
            parallel_calls=self.parallel_tool_calls is not False,
            format=self.text.format.format() if self.text is not None and self.text.format is not None else None,
            effort=self.reasoning.effort if self.reasoning is not None else None,
            thought_budget=self.thinking_budget,
            template_options=options,
        )

    def messages(self) -> list[dict[str, Any]]:
        """The items as messages: what the assistant thought, said and called in a row is one."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        turn: dict[str, Any] | None = None
        for item in self.input:
            mine = isinstance(item, CallItem | ReasoningItem) or (
                isinstance(item, MessageItem) and item.role == "assistant"
            )
            if mine and turn is None:
                turn = {"role": "assistant", "content": None}
                messages.append(turn)
            elif not mine:
                turn = None
            if isinstance(item, CallOutputItem):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": join(item.output)})
            elif turn is None and isinstance(item, MessageItem):
                messages.append({"role": item.role, "content": join(item.content)})
            elif turn is not None:
                extend_turn(turn, item)
        return messages

    def _choose(self) -> tuple[str, str | None]:
        if self.tool_choice in (None, "none", "auto"):
            return str(self.tool_choice or "auto"), None
        if not self.tools:
            raise InvalidRequest("'tool_choice' needs 'tools'", param="tool_choice", code="invalid_value")
        return "required", self.tool_choice.name if isinstance(self.tool_choice, ResponseToolName) else None


def extend_turn(turn: dict[str, Any], item: MessageItem | CallItem | CallOutputItem | ReasoningItem) -> None:
    """Add what the assistant did next to its message."""
    if isinstance(item, MessageItem):
        turn["content"] = (turn["content"] or "") + join(item.content)
    elif isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, ReasoningItem):
        thought = "".join(part.text for part in item.content or item.summary)
        turn["reasoning_content"] = turn.get("reasoning_content", "") + thought
