"""What `polymux plugin check` works with: a tiny model of a pipeline, and what to ask it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec


@dataclass(frozen=True, kw_only=True)
class Example:
    """A tiny model of one pipeline, made in a moment and without any network, and what to ask it."""

    pipeline: str
    """The pipeline's name; what it `accepts` is checked with the model too."""
    make: Callable[[Path], None]
    """Writes the model into an empty folder: config.json and safetensors, the same weights every time."""
    asks: Mapping[str, Sequence[msgspec.Struct]]
    """Task -> asks that are answered. Each task of the pipeline needs one; different lengths find more."""
    messages: Mapping[str, Sequence[msgspec.Struct]] = field(default_factory=dict)
    """Task -> what is posted to every job of it, for tasks that take what follows while they run."""
    refused: Mapping[str, Sequence[msgspec.Struct]] = field(default_factory=dict)
    """Task -> asks that a user could send and that are refused, each with its `param`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The model's options, as in `[models.NAME]`."""
    tolerance: float = 0.0
    """How far a number may be in a batch from the one alone, relative to the largest; texts leave no room."""
    dtype: str = "u1"
    """What the bytes of an answer hold, as numpy calls it: "<f4" for vectors, "<i2" for sound."""
