"""One scheduler for all stages of an engine: which lane's launch comes next.

Steps are unequal (a chat step takes milliseconds, a denoising step a hundred), so lanes share device time, not turns:
the runnable lane that has had the least goes next. A lane that was idle starts level with the others, it does not
save up. While several want the device, long launches are cut to slices.
"""

from __future__ import annotations

from collections.abc import Iterable

from polymux.core.batch.lane import Lane
from polymux.core.batch.plan import Plan
from polymux.core.batch.row import Row
from polymux.core.batch.stage import Stage
from polymux.core.cache.arena import Arena


class Scheduler:
    """Lanes by stage. `slice_ms` bounds a launch while another lane is waiting for the device."""

    def __init__(self, stages: Iterable[Stage], arena: Arena, slice_ms: float) -> None:
        self.lanes = {stage.name: Lane(stage, arena) for stage in stages}
        self.slice_ms = slice_ms
        self._busy: set[str] = set()

    def lane(self, stage: Stage) -> Lane:
        return self.lanes[stage.name]

    def enqueue(self, stage: Stage, row: Row) -> None:
        self.lane(stage).enqueue(row)

    def plan(self) -> tuple[Lane, Plan] | None:
        """The next launch and its lane, or None when nothing can run now."""
        runnable = [lane for lane in self.lanes.values() if lane.runnable]
        self._level(runnable)
        crowded = sum(not lane.stage.on_host for lane in runnable) > 1
        for lane in sorted(runnable, key=lambda lane: lane.virtual_ms):
            plan = lane.plan(self.slice_ms if crowded else None)
            if plan is not None:
                return lane, plan
        return None

    def _level(self, runnable: list[Lane]) -> None:
        names = {lane.stage.name for lane in runnable}
        others = [lane.virtual_ms for lane in runnable if lane.stage.name in self._busy]
        if others:
            floor = min(others)
            for lane in runnable:
                if lane.stage.name not in self._busy:
                    lane.virtual_ms = max(lane.virtual_ms, floor)
        self._busy = names
