"""How long the parts of a start take: measured where they run, told where the model is listed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_begun = time.monotonic()

_parts: ContextVar[dict[str, float] | None] = ContextVar("parts", default=None)


def begin() -> None:
    """The process begins now."""
    global _begun
    _begun = time.monotonic()


def since_begin() -> float:
    """Seconds since the process began."""
    return time.monotonic() - _begun


@contextmanager
def stopwatch() -> Iterator[dict[str, float]]:
    """Seconds of the parts that are measured inside, in their order."""
    parts: dict[str, float] = {}
    token = _parts.set(parts)
    try:
        yield parts
    finally:
        _parts.reset(token)


@contextmanager
def part(name: str) -> Iterator[None]:
    """Measure a part; one of the same name adds to it. Without a stopwatch around it, nothing is kept."""
    began = time.monotonic()
    try:
        yield
    finally:
        parts = _parts.get()
        if parts is not None:
            parts[name] = round(parts.get(name, 0.0) + time.monotonic() - began, 3)
