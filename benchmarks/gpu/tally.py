"""What each stage of a loop did: how many launches, how full, and how long the host and the device were at it."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from polymux.core.batch.lane import Lane
from polymux.core.batch.plan import Plan
from polymux.core.batch.stage import Outcomes, Ticket
from polymux.core.engine.loop import Loop


@dataclass
class Tally:
    """Of one stage, since the beginning."""

    launches: int = 0
    rows: int = 0
    units: int = 0
    host: float = 0.0
    """Seconds until launches were out, and of what came after they were back."""
    charged: float = 0.0
    """Seconds that the scheduler took its launches to last."""

    def __sub__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(self)))

    def __str__(self) -> str:
        each = max(self.launches, 1)
        return (
            f"{self.launches} x {self.rows / each:.1f} rows {self.units / each:.0f} units, "
            f"host {self.host:.2f} s, lasted {self.charged:.2f} s"
        )


class Tallies:
    """By stage; `describe` tells what was added since it last did."""

    def __init__(self, loop: Loop) -> None:
        self._lanes = loop.scheduler.lanes
        self.found = {name: Tally() for name in self._lanes}
        self._told = {name: Tally() for name in self._lanes}
        for name, lane in self._lanes.items():
            self._watch(lane, self.found[name])

    def describe(self) -> str:
        lines = []
        for name, tally in self.found.items():
            lane = self._lanes[name]
            waiting = f"{len(lane.running)} run, {len(lane.waiting)} wait"
            lines.append(f"         {name}: {tally - self._told[name]}; {waiting}")
            self._told[name] = tally - Tally()
        return "\n".join(lines)

    def _watch(self, lane: Lane, tally: Tally) -> None:
        stage: Any = lane.stage
        launch, collect, charge = stage.launch, stage.collect, lane.charge

        def count(plan: Plan) -> Ticket:
            started = time.perf_counter()
            ticket = launch(plan)
            tally.host += time.perf_counter() - started
            tally.launches += 1
            tally.rows += len(plan.grants)
            tally.units += plan.units
            return ticket

        def note(ms: float, plan: Plan) -> None:
            tally.charged += ms / 1e3
            charge(ms, plan)

        stage.launch, stage.collect = count, partial(_clock, collect, tally)
        lane.charge = note  # type: ignore[method-assign]


def _clock(collect: Any, tally: Tally, ticket: Ticket) -> Outcomes:
    started = time.perf_counter()
    try:
        return collect(ticket)  # type: ignore[no-any-return]
    finally:
        tally.host += time.perf_counter() - started
