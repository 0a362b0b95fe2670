"""A card that is not there: launches take what they were found to take on one, by a clock of their own.

Between launches the clock goes as the processor time of this thread does, so programs and the loop cost what they cost
here. What a launch computes is computed, and takes no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from polymux.core.batch.plan import Plan
from polymux.core.batch.stage import Outcomes, Ticket
from polymux.core.engine.loop import Loop

Price = Callable[[Plan], tuple[float, float]]
"""Milliseconds of a launch: of the host until it is out, and of the card."""


class Clock:
    """Replaces the system's, for who asks `time`."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self._card = 0.0
        """When the card has done all that was launched."""

    def now(self) -> float:
        return time.thread_time() + self._ahead

    def sleep(self, seconds: float) -> None:
        self._ahead += seconds

    def install(self) -> None:
        time.monotonic = time.perf_counter = self.now
        time.sleep = self.sleep  # type: ignore[assignment]

    def simulate(self, loop: Loop, prices: dict[str, Price]) -> None:
        """From now on launches of the stages named take what their price says."""
        for name, lane in loop.scheduler.lanes.items():
            self._wrap(lane.stage, prices[name.partition("/")[2]])

    def _wrap(self, stage: Any, price: Price) -> None:
        launch, collect = stage.launch, stage.collect
        due: dict[int, float] = {}

        def start(plan: Plan) -> Ticket:
            host, card = price(plan)
            begun = self.now()
            ticket: Ticket = launch(plan)
            self._go_to(begun + host / 1e3)
            # the card begins while the host still launches
            self._card = max(self.now(), max(self._card, begun) + card / 1e3)
            due[id(ticket)] = self._card
            return ticket

        def end(ticket: Ticket) -> Outcomes:
            begun = self.now()
            outcomes: Outcomes = collect(ticket)
            self._go_to(max(begun, due.pop(id(ticket))))
            return outcomes

        stage.launch, stage.collect = start, end

    def _go_to(self, moment: float) -> None:
        self._ahead += moment - self.now()
