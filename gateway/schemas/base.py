"""What all wire objects share: a field is honoured or refused, never ignored in silence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field
from pydantic_core import PydanticCustomError

MAX_INT = 2**31 - 1


class WireRequest(BaseModel):
    """Something a client sends: unknown fields are refused, "1" is no number, 1 is no boolean, NaN is nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class WireAnswer(BaseModel):
    """Something the gateway sends."""

    model_config = ConfigDict(extra="forbid")


def only(*accepted: Any, reason: str = "is not supported") -> AfterValidator:
    """A field of the protocol that is not served: what changes nothing is accepted, anything else refused."""

    def check(value: Any) -> Any:
        if value is None or any(value == each and type(value) is type(each) for each in accepted):
            return value
        raise PydanticCustomError("unsupported_parameter", "{reason}", {"reason": reason})

    return AfterValidator(check)


def choose(kind: Callable[[Any], str | None], expected: str) -> Discriminator:
    """For a union whose branch is chosen by looking once at the value: one complaint, about what the user meant.

    `kind` names the tag of a branch or returns None when the value is none of them. Tags are written in angle
    brackets so that they can be told from field names in the path of an error.
    """
    return Discriminator(kind, custom_error_type="invalid_value", custom_error_message=f"must be {expected}")


def by_type(tags: Mapping[type[Any], str]) -> Callable[[Any], str | None]:
    """The tag of a value's exact type: true is no number."""
    return lambda value: tags.get(type(value))


TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


def _is_none(value: Any) -> bool:
    return value is None


def maybe(description: str | None = None) -> Any:
    """A field of an answer that is left out, rather than null, where there is nothing to say."""
    return Field(None, exclude_if=_is_none, description=description)
