"""Bounded work: each model has a gate with so many places to run and so many to wait; beyond them it is 429 at once."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from polymux.core.errors import Overloaded

LONGEST_RETRY = 60.0
"""Seconds; a client told to wait longer would rather go elsewhere."""


class Gate:
    """Admits requests by weight (the choices they ask for), in order of arrival.

    A request heavier than the whole gate takes all of it. `running` and `waiting` are weights, for the metrics.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.running = 0
        self.waiting = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._seconds = 1.0
        """Moving average of how long one admitted request holds its place."""

    @asynccontextmanager
    async def admit(self, weight: int) -> AsyncIterator[None]:
        """Hold `weight` places. Raises `Overloaded` without waiting when the queue is full."""
        weight = min(weight, self.max_running)
        if self._queue or self.running + weight > self.max_running:
            await self._wait(weight)
        else:
            self.running += weight
        begin = time.monotonic()
        try:
            yield
        finally:
            self._seconds += 0.1 * (time.monotonic() - begin - self._seconds)
            self.running -= weight
            self._advance()

    async def _wait(self, weight: int) -> None:
        if self.waiting + weight > self.max_waiting:
            raise Overloaded(
                f"the queue of this model is full ({self.running} running, {self.waiting} waiting)",
                retry_after=self._estimate(weight),
            )
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((weight, place))
        self.waiting += weight
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # admitted and cancelled in the same turn of the loop
                self.running -= weight
            else:
                self._queue.remove((weight, place))
                self.waiting -= weight
            self._advance()
            raise

    def _advance(self) -> None:
        while self._queue and self.running + self._queue[0][0] <= self.max_running:
            weight, place = self._queue.popleft()
            self.waiting -= weight
            self.running += weight
            place.set_result(None)

    def _estimate(self, weight: int) -> float:
        rounds = (self.waiting + weight) / self.max_running
        return min(LONGEST_RETRY, max(1.0, rounds * self._seconds))


class Gates:
    """One gate per served model, made when first needed: only names that the service knows get here."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._limits = (max_running, max_waiting)
        self._gates: dict[str, Gate] = {}

    def of(self, model: str) -> Gate:
        gate = self._gates.get(model)
        if gate is None:
            gate = self._gates[model] = Gate(*self._limits)
        return gate

    def __iter__(self) -> Iterator[tuple[str, Gate]]:
        return iter(self._gates.items())
