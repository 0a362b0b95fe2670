"""What an answer must look like: OpenAI's `response_format`, and formats beyond JSON as an extension."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from polymux.core.tasks import Format
from polymux.gateway.schemas.base import WireRequest

ANY_OBJECT = {"type": "object"}


class TextFormat(WireRequest):
    type: Literal["text"]

    def format(self) -> Format | None:
        return None


class JsonObjectFormat(WireRequest):
    type: Literal["json_object"]

    def format(self) -> Format:
        return Format("schema", ANY_OBJECT)


class JsonSchema(WireRequest):
    name: str = Field(min_length=1, max_length=64, pattern="^[A-Za-z0-9_-]+$")
    schema_: dict[str, Any] | bool = Field(ANY_OBJECT, alias="schema")
    description: str | None = Field(None, description="Accepted; say it in the prompt as well.")
    strict: bool | None = Field(None, description="The schema is always kept; keywords that cannot be are refused.")


class JsonSchemaFormat(WireRequest):
    type: Literal["json_schema"]
    json_schema: JsonSchema

    def format(self) -> Format:
        return Format("schema", self.json_schema.schema_)


def _kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if kind in ("text", "json_object", "json_schema") else None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    Discriminator(
        _kind,
        custom_error_type="invalid_value",
        custom_error_message="must be an object whose type is text, json_object or json_schema",
    ),
]


class StructuredOutputs(WireRequest):
    """Exactly one of these."""

    json_: dict[str, Any] | bool | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = Field(None, max_length=8192, description="Matched as a whole.")
    choice: list[str] | None = Field(None, min_length=1, max_length=1024)
    grammar: str | None = Field(None, max_length=131072, description="In Lark (llguidance's variant) or GBNF.")

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        if sum(value is not None for value in (self.json_, self.regex, self.choice, self.grammar)) != 1:
            raise ValueError("needs exactly one of json, regex, choice and grammar")
        return self

    def format(self) -> Format:
        if self.json_ is not None:
            return Format("schema", self.json_)
        if self.regex is not None:
            return Format("regex", self.regex)
        if self.choice is not None:
            return Format("choice", self.choice)
        return Format("grammar", self.grammar)
