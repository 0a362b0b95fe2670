"""A clock that a test moves by hand, in place of `time.monotonic`.

clock = Clock()
monkeypatch.setattr(time, "monotonic", clock)
clock.advance(30)
"""

from __future__ import annotations


class Clock:
    """Called, it says the time in seconds; it stands still until it is told."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass. Raises `ValueError` for a step back: the clock is monotonic."""
        if seconds < 0:
            raise ValueError("a monotonic clock does not go back")
        self.now += seconds
