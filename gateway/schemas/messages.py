"""`POST /v1/messages`: Anthropic's request, and how its blocks become a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from polymux.core.errors import InvalidRequest
from polymux.core.tasks import Chat, Format, Sampling
from polymux.gateway.schemas.base import MAX_INT, WireRequest, by_type, choose, only
from polymux.gateway.schemas.chat import Scalar
from polymux.gateway.schemas.pictures import join_words, write_image
from polymux.gateway.schemas.tools import Name


class CacheControl(WireRequest):
    """Accepted; prompts are cached by content."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class TextBlock(WireRequest):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any] | None, only([])] = None

    def plain(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class ImageSource(WireRequest):
    type: Literal["base64", "url"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] | None = None
    data: str | None = Field(None, min_length=1)
    url: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _whole(self) -> ImageSource:
        if (self.data is None) == (self.type == "base64") or (self.url is None) == (self.type == "url"):
            raise ValueError("data goes with type base64, and url with type url")
        return self


class ImageBlock(WireRequest):
    type: Literal["image"]
    source: ImageSource
    cache_control: CacheControl | None = None

    def plain(self) -> dict[str, Any]:
        source = self.source
        return write_image(source.url or f"data:{source.media_type or ''};base64,{source.data}")


class ThinkingBlock(WireRequest):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(WireRequest):
    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=256)
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Any = None


def _tag(*kinds: str) -> Discriminator:
    def kind(value: Any) -> str | None:
        found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return f"<{found}>" if found in kinds else None

    return Discriminator(
        kind,
        custom_error_type="invalid_value",
        custom_error_message=f"must be a block of type {', '.join(kinds)}",
    )


class ToolResultBlock(WireRequest):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=256)
    content: Shown | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None

    def plain(self) -> Any:
        """A text, or parts where there is a picture."""
        content = join(self.content or "")
        if not self.is_error:
            return content
        return f"Error: {content}" if isinstance(content, str) else [{"type": "text", "text": "Error: "}, *content]


Blocks = Annotated[
    Annotated[str, Tag("<words>")]
    | Annotated[list[TextBlock], Field(max_length=4096, fail_fast=True), Tag("<blocks>")],
    choose(by_type({str: "<words>", list: "<blocks>"}), "a string or a list of text blocks"),
]
Shown = Annotated[
    Annotated[str, Tag("<words>")]
    | Annotated[
        list[
            Annotated[
                Annotated[TextBlock, Tag("<text>")] | Annotated[ImageBlock, Tag("<image>")], _tag("text", "image")
            ]
        ],
        Field(max_length=4096, fail_fast=True),
        Tag("<blocks>"),
    ],
    choose(by_type({str: "<words>", list: "<blocks>"}), "a string or a list of text and image blocks"),
]
Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    _tag("text", "image", "thinking", "tool_use", "tool_result"),
]
Content = Annotated[
    Annotated[str, Field(min_length=1), Tag("<words>")]
    | Annotated[list[Block], Field(min_length=1, max_length=4096, fail_fast=True), Tag("<blocks>")],
    choose(by_type({str: "<words>", list: "<blocks>"}), "a string or a list of blocks"),
]


def join(blocks: str | Sequence[TextBlock | ImageBlock]) -> Any:
    """One text where there is nothing else, otherwise parts as chats carry them."""
    return blocks if isinstance(blocks, str) else join_words([block.plain() for block in blocks])


class MessageTurn(WireRequest):
    role: Literal["user", "assistant", "system"]
    content: Content

    @field_validator("content")
    @classmethod
    def _the_assistant_shows_nothing(cls, value: Content, info: ValidationInfo) -> Content:
        shown = not isinstance(value, str) and any(isinstance(block, ImageBlock) for block in value)
        if shown and info.data.get("role") == "assistant":
            raise ValueError("the assistant sends no images")
        return value

    def plain(self) -> list[dict[str, Any]]:
        """As chat templates want it: results of tools are messages of their own, before what the user adds."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.plain()}
            for block in self.content
            if isinstance(block, ToolResultBlock)
        ]
        told = [block for block in self.content if isinstance(block, TextBlock | ImageBlock)]
        calls = [block for block in self.content if isinstance(block, ToolUseBlock)]
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        message: dict[str, Any] = {"role": self.role, "content": join(told) if told else None}
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = [write_call(call) for call in calls]
        return [*results, message] if told or calls or thoughts else results


def write_call(call: ToolUseBlock) -> dict[str, Any]:
    arguments = msgspec.json.encode(call.input).decode()
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


class MessageTool(WireRequest):
    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None

    def plain(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class MessageToolChoice(WireRequest):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(WireRequest):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    display: str | None = None


class OutputFormat(WireRequest):
    type: Literal["json_schema"]
    schema_: dict[str, Any] | bool = Field(alias="schema")


class OutputConfig(WireRequest):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessageMetadata(WireRequest):
    user_id: str | None = None


class PromptFields(WireRequest):
    """What a prompt is made of."""

    model: str
    messages: list[MessageTurn] = Field(min_length=1, max_length=4096, fail_fast=True)
    system: Blocks | None = None
    tools: list[MessageTool] | None = Field(None, max_length=128)
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    @field_validator("tool_choice")
    @classmethod
    def _named(cls, value: MessageToolChoice | None) -> MessageToolChoice | None:
        if value is not None and (value.type == "tool") != (value.name is not None):
            raise ValueError("a name goes with type tool, and only with it")
        return value

    def prompt(self) -> Chat:
        """Raises `InvalidRequest` where two fields contradict each other."""
        messages = [message for turn in self.messages for message in turn.plain()]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": join(self.system)})
        choice, kind = self.tool_choice, self.tool_choice.type if self.tool_choice is not None else "auto"
        if kind in ("any", "tool") and not self.tools:
            raise InvalidRequest("'tool_choice' needs 'tools'", param="tool_choice", code="invalid_value")
        config = self.output_config or OutputConfig()
        return Chat(
            messages=messages,
            tools=[tool.plain() for tool in self.tools] if self.tools else None,
            tool_choice={"any": "required", "tool": "required"}.get(kind, kind),
            tool=choice.name if choice is not None else None,
            parallel_calls=not (choice is not None and choice.disable_parallel_tool_use),
            format=Format("schema", config.format.schema_) if config.format is not None else None,
            effort=self._effort(config.effort),
            thought_budget=self.thinking.budget_tokens if self.thinking is not None else None,
        )

    def _effort(self, effort: str | None) -> str | None:
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        if effort is not None:
            return {"max": "xhigh"}.get(effort, effort)
        return "medium" if self.thinking is not None and self.thinking.type == "enabled" else None


class CountRequest(PromptFields):
    """`POST /v1/messages/count_tokens`."""


class MessageRequest(PromptFields):
    max_tokens: int = Field(ge=1, le=MAX_INT)
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = Field(None, max_length=16)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_INT)
    top_p: float | None = Field(None, gt=0, le=1)
    metadata: MessageMetadata | None = Field(None, description="Accepted; changes nothing.")
    service_tier: str | None = Field(None, description="Accepted; changes nothing: there is one tier.")
    container: Annotated[Any, only()] = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="Extension.")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=1024, description="Extension."
    )
    chat_template_kwargs: dict[str, Scalar] | None = Field(None, max_length=32, description="Extension.")

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if any(not (key.isascii() and key.isdigit() and int(key[:20]) <= MAX_INT) for key in value or ()):
            raise ValueError("keys must be token ids")
        return value

    def ask(self) -> Chat:
        """The task's own Struct. Raises `InvalidRequest` where two fields contradict each other."""
        sampling = Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
            logit_bias={int(key): bias for key, bias in (self.logit_bias or {}).items()},
        )
        return msgspec.structs.replace(
            self.prompt(),
            sampling=sampling,
            max_tokens=self.max_tokens,
            stop=list(self.stop_sequences or ()),
            template_options=dict(self.chat_template_kwargs or {}),
        )
