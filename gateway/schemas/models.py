"""The list of served models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from polymux.gateway.schemas.base import WireAnswer, maybe


class ModelCard(WireAnswer):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "polymux"
    tasks: list[str]
    alias_of: str | None = maybe("The model that answers under this name.")
    facts: dict[str, Any] = Field(description="What the pipeline says about it: context length, dimensions, ...")


class ModelList(WireAnswer):
    object: Literal["list"] = "list"
    data: list[ModelCard]
