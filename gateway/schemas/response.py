"""What `POST /v1/responses` answers: items, and the events by which they grow."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from polymux.core.vocabulary import Usage
from polymux.gateway.schemas.base import WireAnswer, maybe
from polymux.gateway.schemas.usage import ReceiptBody


class OutputText(WireAnswer):
    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)


class OutputMessage(WireAnswer):
    type: Literal["message"] = "message"
    id: str
    status: str = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = Field(default_factory=list)


class OutputCall(WireAnswer):
    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


class OutputThought(WireAnswer):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class OutputReasoning(WireAnswer):
    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[Any] = Field(default_factory=list)
    content: list[OutputThought] = Field(default_factory=list)
    status: str = "in_progress"


OutputItem = OutputMessage | OutputCall | OutputReasoning


class InputDetails(WireAnswer):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(WireAnswer):
    reasoning_tokens: int


class ResponseUsage(WireAnswer):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        return cls(
            input_tokens=usage.input_tokens,
            input_tokens_details=InputDetails(cached_tokens=usage.cached_tokens),
            output_tokens=usage.output_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=usage.reasoning_tokens),
            total_tokens=usage.input_tokens + usage.output_tokens,
        )


class ResponseFailure(WireAnswer):
    code: str
    message: str


class Incomplete(WireAnswer):
    reason: str


class ResponseBody(WireAnswer):
    """The answer; in a stream, what is known of it so far. Settings are sent back as they were asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    error: ResponseFailure | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem] = Field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    metadata: dict[str, str]
    receipt: ReceiptBody | None = maybe("Extension. Where the time went.")


class ResponseEvent(WireAnswer):
    """A frame of the stream. `type` says which of the other fields there are."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
