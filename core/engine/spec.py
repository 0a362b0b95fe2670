"""What an engine process is told when it starts; crosses as one line of JSON on its standard input."""

from __future__ import annotations

from typing import Any

import msgspec


class ModelSpec(msgspec.Struct, kw_only=True):
    """One model to load: its files are local already. `pipeline` is a pipeline's name."""

    name: str
    reference: str
    folder: str
    pipeline: str
    options: dict[str, Any] = {}
    optional: bool = False
    """Nobody asked for it by name: when it cannot be loaded, the others are served, and its facts say `error`."""


class EngineSpec(msgspec.Struct, kw_only=True):
    """All that an engine process needs to know."""

    name: str
    models: list[ModelSpec] = []
    device: str = "cpu"
    plugin_dirs: list[str] = []
    disabled_plugins: list[str] = []
    settings: dict[str, Any] = {}
    commands: str = ""
    """Where to take commands from and send reports to: zmq addresses, filled in by the supervisor, as is `began`."""
    reports: str = ""
    began: float | None = None
    """When the start began whose end is this engine's readiness, in seconds of `stopwatch.now`."""
