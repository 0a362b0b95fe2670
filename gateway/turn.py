"""A task that finds all it waits for at hand would keep the event loop from every other: now and then it steps back."""

from __future__ import annotations

import asyncio
import time

LONGEST = 0.005
"""Seconds."""


class Turn:
    """One task's time on the event loop; begins now."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def pass_on(self) -> None:
        """Lets others have the event loop, if this turn has lasted long enough."""
        if time.perf_counter() - self._began > LONGEST:
            await asyncio.sleep(0)
            self._began = time.perf_counter()
