"""One plugin: where it came from, how it fares, and where to look when it broke."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from polymux.core.errors import PluginError
from polymux.core.plugins.watch import Cost

MAY_BE_HEAVY = ("attention_backends", "quantizers", "step_caches", "drafters", "examples", "checks")
"""Hooks that may import torch."""


@dataclass(frozen=True)
class Fault:
    """Why a plugin is disabled: in which hook, what went wrong, where, and what to do next."""

    hook: str
    message: str
    where: str
    advice: str

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        return f"{self.hook}: {self.message}{where}. {self.advice}"


@dataclass
class Plugin:
    """One plugin and how it fares. `origin` is a distribution with its version, a file, or "built-in"."""

    name: str
    """Unique; a file's own name, or the entry point's."""
    origin: str
    """A distribution with its version, a file or folder, or built-in."""
    load: Callable[[], ModuleType]
    """Imports it."""
    module: ModuleType | None = None
    """Once it is imported."""
    api_level: int | None = None
    """What it states."""
    hooks: tuple[str, ...] = ()
    """Which it implements."""
    fault: Fault | None = None
    """Why it failed."""
    status: str = "enabled"
    """enabled; disabled (by the user, see `reason`); failed (see `fault`)."""
    reason: str = ""
    """Why the user's settings leave it out."""
    notes: list[str] = field(default_factory=list)
    """What works and should be otherwise: slow hooks, prints, what the next API level drops."""
    trace: dict[str, Cost] = field(default_factory=dict)
    """Call -> what it cost: `import`, and every hook that was called."""

    def record(self, call: str, cost: Cost) -> None:
        """Keep what a call cost, and what there is to say about it."""
        self.trace[call] = cost
        self.notes += cost.warn(call, free=call in MAY_BE_HEAVY)

    def describe(self) -> dict[str, Any]:
        """The facts as plain data, for people and programs."""
        return {
            "name": self.name,
            "origin": self.origin,
            "status": self.status,
            "api_level": self.api_level,
            "hooks": list(self.hooks),
            "reason": str(self.fault) if self.fault else self.reason or None,
            "notes": list(self.notes),
            "trace": {call: {"ms": cost.ms, "mib": cost.mib} for call, cost in self.trace.items()},
        }


def describe_fault(plugin: Plugin, hook: str, error: BaseException, advice: str | None = None) -> Fault:
    """The fault of `plugin` in `hook`; without an `advice`, the usual one."""
    return Fault(
        hook=f"plugin {plugin.name!r}, {hook}",
        message=str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}",
        where=locate(error, plugin),
        advice=advice or f"Fix it, or leave it out: --disable-plugin {plugin.name}",
    )


def locate(error: BaseException, plugin: Plugin) -> str:
    """file:line of the last frame inside the plugin's own code; the plugin's origin when none of it ran."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    own = getattr(plugin.module, "__file__", None) or plugin.origin
    home = os.path.abspath(own.removesuffix("__init__.py"))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if os.path.abspath(frame.filename).startswith(home):
            return f"{frame.filename}:{frame.lineno}"
    return own
