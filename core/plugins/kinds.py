"""What a plugin's hooks may answer, and the level of the contract it was written for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from polymux.core.errors import PluginError
from polymux.core.models import ModelSource
from polymux.core.pipeline import Pipeline
from polymux.core.plugins.example import Example
from polymux.core.vocabulary import API_LEVEL, NamedModel, Task

OLDEST_API_LEVEL = 1

KINDS: dict[str, tuple[type, str]] = {
    "tasks": (Task, "name"),
    "pipelines": (Pipeline, "name"),
    "named_models": (NamedModel, "name"),
    "model_sources": (ModelSource, "scheme"),
}
"""Hook -> what its list must hold, and the attribute that must be unique over all plugins."""

LATE: dict[str, tuple[str, str]] = {
    "attention_backends": ("polymux.core.compute.attention", "AttentionBackend"),
    "quantizers": ("polymux.core.compute.quantization", "Quantizer"),
    "call_formats": ("polymux.core.text.calls", "CallFormat"),
    "drafters": ("polymux.core.batch.drafting", "Drafting"),
    "step_caches": ("polymux.core.cache.rules", "StepCaching"),
}
"""The same for hooks whose kinds are imported late, most because only engines call them and they need torch. All
have a `name`."""

FREE = {"examples": Example, "checks": Path, "routes": object, "middleware": object}
"""Hook -> what its list must hold where nothing must be unique. The gateway looks into what is its own."""


def read_api_level(module: ModuleType) -> int:
    """The level that a plugin states as `POLYMUX_API_LEVEL`; the oldest one when it states none."""
    level = getattr(module, "POLYMUX_API_LEVEL", OLDEST_API_LEVEL)
    if not isinstance(level, int):
        raise PluginError(f"POLYMUX_API_LEVEL is {level!r}, not a whole number")
    if not OLDEST_API_LEVEL <= level <= API_LEVEL:
        raise PluginError(f"it speaks API level {level}; this polymux speaks {OLDEST_API_LEVEL} to {API_LEVEL}")
    return level


def check_answer(hook: str, values: Any, taken: dict[str, str]) -> None:
    """Raise `PluginError` unless `values` is a list of what the hook asks for, under names not yet `taken`."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise PluginError(f"it returned {type(values).__name__}, not a list")
    kind, key = read_kind(hook)
    seen = dict(taken)
    for value in values:
        if not isinstance(value, kind):
            raise PluginError(f"it returned a {type(value).__name__} where a {kind.__name__} belongs")
        if key is None:
            continue
        name = getattr(value, key, None)
        if not isinstance(name, str) or not name:
            raise PluginError(f"a {kind.__name__} has no {key}")
        if name in seen:
            raise PluginError(f"{key} {name!r} is already registered by plugin {seen[name]!r}")
        seen[name] = "itself"


def read_kind(hook: str) -> tuple[type, str | None]:
    """What the list of a hook holds, and the attribute by which its values are told apart, if they must be."""
    if hook in KINDS:
        return KINDS[hook]
    if hook in FREE:
        return FREE[hook], None
    module, name = LATE[hook]
    kind: type = getattr(importlib.import_module(module), name)  # whoever asks has it anyway
    return kind, "name"
