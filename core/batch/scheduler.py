"""One scheduler for all stages of an engine: which lane's launch comes next.

Steps are unequal (a chat step takes milliseconds, a denoising step a hundred), so lanes share device time, not turns:
the runnable lane that has had the least goes next, and one that feeds another may be ahead by its head start. A lane
that was idle starts level with the others, it does not save up; once nothing ran at all, nobody owes any. While
several want the device, long launches are cut to slices.
"""

from __future__ import annotations

from collections.abc import Iterable

from polymux.core.batch.lane import Lane
from polymux.core.batch.plan import Plan
from polymux.core.batch.row import Row, RowState
from polymux.core.batch.stage import Stage
from polymux.core.cache.arena import Arena
from polymux.core.errors import InternalError


class Scheduler:
    """Lanes by stage. `slice_ms` bounds a launch while others wait for the device: another lane, or a stream."""

    def __init__(self, stages: Iterable[Stage], arena: Arena, slice_ms: float) -> None:
        self.lanes = {stage.name: Lane(stage, arena) for stage in stages}
        self.slice_ms = slice_ms
        self._busy: set[str] = set()

    def lane(self, stage: Stage) -> Lane:
        return self.lanes[stage.name]

    def enqueue(self, stage: Stage, row: Row) -> None:
        self.lane(stage).enqueue(row)

    def plan(self, *, busy: bool = False) -> tuple[Lane, Plan] | None:
        """The next launch and its lane, or None when nothing can run now, or should while the device is `busy`."""
        runnable = [lane for lane in self.lanes.values() if lane.runnable]
        self._level(runnable)
        crowded = sum(not lane.stage.on_host for lane in runnable) > 1
        order = sorted(runnable, key=lambda lane: lane.virtual_ms - lane.stage.head_start_ms)
        gathering = {lane for lane in order if lane.gathers}
        for lane in order:
            plan = lane.plan(self.slice_ms, crowded, admits=lane not in gathering)
            if plan is not None:
                return lane, plan
        for lane in order:  # nobody else uses the device: to wait would save nothing
            plan = lane.plan(self.slice_ms, crowded) if lane in gathering and not busy else None
            if plan is not None:
                return lane, plan
        return None

    def make_room(self) -> tuple[Lane, Row] | None:
        """Nothing is in flight, and still rows want to run: the last row of all makes room for the first.

        Returns the first row when nobody is left to make room: it can never get what it needs.
        """
        lanes = self.lanes.values()
        running = [(row.rank, lane, row) for lane in lanes for row in lane.running]
        stuck = [entry for entry in running if entry[1].stage.want(entry[2])]
        stuck = stuck or [(row.rank, lane, row) for lane in lanes for row in lane.waiting]
        if not stuck:
            return None
        _, lane, row = min(stuck)
        others = [entry for entry in running if entry[2] is not row]
        if not others or row.state is not RowState.RUNNING:
            return lane, row
        _, other, victim = max(others)
        other.preempt(victim)
        lane.residency.grow(row, lane.stage.reach(row, 1))  # at once, or the victim could take it back
        return None

    def tend(self) -> bool:
        """Nothing runs: some stage makes its later launches faster. True while there is more to do."""
        return any(lane.stage.tend() for lane in self.lanes.values())

    def stats(self) -> dict[str, float]:
        lanes = self.lanes.values()
        return {
            "rows_running": sum(len(lane.running) for lane in lanes),
            "rows_waiting": sum(len(lane.waiting) for lane in lanes),
            "prefix_cache_queries_total": sum(lane.residency.queried for lane in lanes),
            "prefix_cache_hits_total": sum(lane.residency.hits for lane in lanes),
            "preemptions_total": sum(lane.preemptions for lane in lanes),
            "guessed_tokens_total": sum(lane.guessed for lane in lanes),
            "accepted_tokens_total": sum(lane.accepted for lane in lanes),
        }

    def check(self) -> None:
        """Raise `InternalError` unless no lane holds anything."""
        for lane in self.lanes.values():
            if lane.waiting or lane.running or lane.retiring or lane.residency.rows:
                raise InternalError(f"lane {lane.stage.name} still holds rows")
            lane.residency.check()

    def _level(self, runnable: list[Lane]) -> None:
        if not self._busy and not any(lane.running or lane.inflight for lane in self.lanes.values()):
            for lane in self.lanes.values():  # nothing ran: what was before is nobody's debt
                lane.virtual_ms = 0.0
        names = {lane.stage.name for lane in runnable}
        others = [lane.virtual_ms for lane in runnable if lane.stage.name in self._busy]
        if others:
            floor = min(others)
            for lane in runnable:
                if lane.stage.name not in self._busy:
                    lane.virtual_ms = max(lane.virtual_ms, floor)
        self._busy = names
