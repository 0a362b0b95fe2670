"""Plugins made in memory, for tests of what uses them.

plugins = make_plugins(make_plugin("mine", tasks=[task], pipelines=[pipeline]))
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from polymux.core.hooks import hookimpl
from polymux.core.plugins import Plugin, Plugins


def make_plugin(name: str, **hooks: Any) -> Plugin:
    """A plugin whose hooks answer these lists, or are these functions."""
    module = ModuleType(name)
    for hook, answer in hooks.items():
        setattr(module, hook, hookimpl(answer if callable(answer) else _answering(answer), specname=hook))
    return Plugin(name, "made in memory", lambda: module)


def make_plugins(*plugins: Plugin, patience: float = 60.0) -> Plugins:
    """A registry of these alone."""
    registry = Plugins(patience=patience)
    for plugin in plugins:
        registry.register(plugin)
    return registry


def _answering(answer: Any) -> Callable[[], Any]:
    return lambda: answer
