"""How long the parts of a start take: measured where they run, told where the model is listed.

Parts may lie inside each other. Each keeps what is its own, so that together they are the whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

now = time.monotonic
"""Seconds on a clock that all processes of a machine share."""

_begun = now()

_parts: ContextVar[dict[str, float] | None] = ContextVar("parts", default=None)


def begin() -> None:
    """The process begins now."""
    global _begun
    _begun = now()


def begun() -> float:
    """When the process began."""
    return _begun


@contextmanager
def stopwatch() -> Iterator[dict[str, float]]:
    """Seconds of the parts that are measured inside, in the order of their ends."""
    parts: dict[str, float] = {}
    token = _parts.set(parts)
    try:
        yield parts
    finally:
        _parts.reset(token)
        for name, seconds in parts.items():
            parts[name] = round(seconds, 3)


@contextmanager
def part(name: str) -> Iterator[None]:
    """Measure a part, without the parts inside it; one of the same name adds to it.

    Without a stopwatch around it, nothing is kept; a thread is not inside of what started it.
    """
    parts = _parts.get()
    if parts is None:
        yield
        return
    began, inside = now(), sum(parts.values())
    try:
        yield
    finally:
        inside = sum(parts.values()) - inside
        parts[name] = parts.get(name, 0.0) + now() - began - inside
