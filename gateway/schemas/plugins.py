"""The list of plugins."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from polymux.gateway.schemas.base import WireAnswer


class PluginCost(WireAnswer):
    ms: float = Field(description="Milliseconds that the call took.")
    mib: float = Field(description="MiB by which the process grew meanwhile.")


class PluginCard(WireAnswer):
    name: str
    origin: str = Field(description="A distribution with its version, a file, or built-in.")
    status: Literal["enabled", "disabled", "failed"]
    api_level: int | None
    hooks: list[str]
    reason: str | None = Field(description="Why it is disabled or failed: plugin, hook, place and next action.")
    notes: list[str] = Field(description="What works and should be otherwise: slow hooks, prints, deprecations.")
    trace: dict[str, PluginCost] = Field(description="What its import and each of its hooks cost.")


class PluginList(WireAnswer):
    object: Literal["list"] = "list"
    data: list[PluginCard]
