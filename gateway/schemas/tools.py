"""Tools: what a client offers, which one it wants called, and the calls in messages and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from polymux.core.errors import InvalidRequest
from polymux.core.tasks import CallDelta
from polymux.gateway.schemas.base import WireAnswer, WireRequest, by_type, choose, maybe

Name = Annotated[str, Field(min_length=1, max_length=64, pattern="^[A-Za-z0-9_.-]+$")]


class FunctionDefinition(WireRequest):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of type object.")
    strict: bool | None = Field(None, description="Refuse keywords that cannot be guaranteed.")


class ToolDefinition(WireRequest):
    type: Literal["function"]
    function: FunctionDefinition

    def plain(self) -> dict[str, Any]:
        return {"type": self.type, "function": self.function.model_dump(exclude_none=True)}


class NamedFunction(WireRequest):
    name: Name


class NamedTool(WireRequest):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")] | Annotated[NamedTool, Tag("<tool>")],
    choose(by_type({str: "<mode>", dict: "<tool>"}), "none, auto, required or a tool"),
]


def read_choice(choice: str | NamedTool | None, tools: Sequence[ToolDefinition] | None) -> tuple[str, str | None]:
    """The mode, and the one tool that must be called. Raises `InvalidRequest` where there is nothing to choose."""
    if choice in (None, "none", "auto"):
        return str(choice or "auto"), None
    if not tools:
        raise InvalidRequest("'tool_choice' needs 'tools'", param="tool_choice", code="invalid_value")
    if isinstance(choice, NamedTool):
        return "required", choice.function.name
    return "required", None


class CalledFunction(WireAnswer):
    name: str
    arguments: str = Field(description="JSON.")


class ToolCall(WireAnswer):
    """A call, complete: in an answer, and in the assistant's message that is sent back."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledFunctionDelta(WireAnswer):
    name: str | None = maybe()
    arguments: str


class ToolCallDelta(WireAnswer):
    """A piece of call `index`: the first has the id and the name, the arguments of all joined are JSON."""

    index: int
    id: str | None = maybe()
    type: Literal["function"] | None = maybe()
    function: CalledFunctionDelta

    @classmethod
    def of(cls, delta: CallDelta) -> ToolCallDelta:
        return cls(
            index=delta.call,
            id=delta.id,
            type="function" if delta.id is not None else None,
            function=CalledFunctionDelta(name=delta.name, arguments=delta.arguments),
        )


def collect_call(calls: list[ToolCall], delta: CallDelta) -> None:
    """Put a piece of a call where it belongs."""
    if delta.id is not None:
        calls.append(ToolCall(id=delta.id, function=CalledFunction(name=delta.name or "", arguments="")))
    calls[delta.call].function.arguments += delta.arguments
