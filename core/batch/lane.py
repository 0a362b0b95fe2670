"""A lane: one stage with its waiting and its running rows, and the rule that fills a plan.

Running rows first, each catches up to where it wants to be within the launch's budget; then new rows. On no room the
newest row of the lowest priority is preempted, never the last one; preempted rows recompute. That one rule covers
chunked prefill, prefix hits, encoder passes and denoising steps.
"""

from __future__ import annotations

import bisect
import time

from polymux.core.batch.plan import Grant, Plan
from polymux.core.batch.residency import Residency
from polymux.core.batch.row import Row, RowState
from polymux.core.batch.stage import Stage
from polymux.core.cache.arena import Arena


def _rank(row: Row) -> tuple[int, int]:
    return row.rank


class Lane:
    """Rows of one stage. Both lists are kept in order of rank: the first runs first, the last is preempted first."""

    def __init__(self, stage: Stage, arena: Arena) -> None:
        self.stage = stage
        self.residency = Residency(stage, arena)
        self.waiting: list[Row] = []
        self.running: list[Row] = []
        self.retiring: set[Row] = set()
        self.answered: list[Row] = []
        """Running rows that need no launch: what they want was cached."""
        self.inflight = 0
        self.preemptions = 0
        self.virtual_ms = 0.0
        """Device time this lane has had, for fairness between lanes."""
        self.unit_ms = 0.0
        """Learned cost of one unit."""

    # ---- rows ----

    def enqueue(self, row: Row) -> None:
        bisect.insort(self.waiting, row, key=_rank)

    def withdraw(self, row: Row) -> None:
        """The row is over (ended, failed or cancelled): free what it holds once no launch names it."""
        if row.state is RowState.WAITING:
            self.waiting.remove(row)
            self._end(row)
        elif row.state is RowState.RUNNING:
            self._retire(row)
        elif row.state is RowState.RETIRING:
            row.again = False

    def preempt(self, row: Row) -> None:
        """Take back what a running row holds; it computes that again once there is room."""
        row.again = True
        self._retire(row)
        self.preemptions += 1

    def settle(self, row: Row) -> None:
        """A launch that named the row is collected."""
        row.inflight -= 1
        if row.state is RowState.RETIRING and row.inflight == 0:
            self._free(row)

    @property
    def runnable(self) -> bool:
        """Whether a plan could be made now, as far as can be told cheaply."""
        if self.stage.on_host and self.inflight:
            return False
        return bool(self.waiting) or any(self.stage.want(row) for row in self.running)

    # ---- plan ----

    def plan(self, slice_ms: float | None) -> Plan | None:
        """The next launch, or None. With `slice_ms` others want the device too: the launch is cut to about that."""
        budget = self._budget(slice_ms)
        grants: list[Grant] = []
        skipped = self._run(budget, grants)
        # room that preempted rows make belongs to the rows that needed it
        if not any(row.again for row in self.retiring) and not (skipped and not grants):
            self._admit(budget - sum(grant.count for grant in grants), grants)
        if not grants:
            return None
        if skipped:  # groups that cannot share a launch take turns
            granted = {grant.row for grant in grants}
            self.running.sort(key=lambda row: row in granted)
        for grant in grants:
            grant.row.inflight += 1
        return Plan(self.stage.name, grants)

    def charge(self, ms: float, units: int) -> None:
        """A launch of `units` units took `ms`."""
        self.virtual_ms += ms
        cost = ms / max(units, 1)
        self.unit_ms = cost if not self.unit_ms else 0.8 * self.unit_ms + 0.2 * cost

    def _budget(self, slice_ms: float | None) -> int:
        if slice_ms is None or not self.unit_ms:
            return self.stage.max_units
        return max(self.stage.least_units, min(self.stage.max_units, int(slice_ms / self.unit_ms)))

    def _run(self, budget: int, grants: list[Grant]) -> bool:
        """Grants for running rows; True if a row was left out because it cannot share the launch."""
        skipped = False
        for row in list(self.running):
            if budget <= 0:
                break
            if row.state is not RowState.RUNNING:
                continue
            units = self._fit(row, budget)
            if units <= 0:
                continue
            if grants and not self.stage.compatible(grants[0].row, row):
                skipped = True
                continue
            if self._make_room(row, units):
                grants.append(self.stage.grant(row, units))
                budget -= units
        return skipped

    def _admit(self, budget: int, grants: list[Grant]) -> None:
        for row in list(self.waiting):
            if budget <= 0:
                break
            if self.residency.awaits(row):
                continue
            if not self.residency.admit(row, alone=not self.running):
                break
            self.waiting.remove(row)
            row.state = RowState.RUNNING
            if row.admitted_at is None:
                row.admitted_at = time.monotonic()
            bisect.insort(self.running, row, key=_rank)
            if self.stage.complete(row):
                self.answered.append(row)
                continue
            units = self._fit(row, budget)
            if units <= 0 or not self.residency.grow(row, self.stage.reach(row, units)):
                continue
            if not grants or self.stage.compatible(grants[0].row, row):  # else its group's turn comes
                grants.append(self.stage.grant(row, units))
                budget -= units

    def _make_room(self, row: Row, units: int) -> bool:
        while not self.residency.grow(row, self.stage.reach(row, units)):
            if self.retiring or len(self.running) == 1:
                return False  # room is on its way, or only other lanes can give it
            victim = self.running[-1]
            self.preempt(victim)
            if victim is row:
                return False
        return True

    def _fit(self, row: Row, budget: int) -> int:
        wanted = self.stage.want(row)
        return wanted if self.stage.indivisible else min(wanted, budget)

    def _retire(self, row: Row) -> None:
        self.running.remove(row)
        row.state = RowState.RETIRING
        if row.inflight:
            self.retiring.add(row)
        else:
            self._free(row)

    def _free(self, row: Row) -> None:
        self.retiring.discard(row)
        self.residency.release(row)
        row.scheduled = row.done = 0
        if not row.again:
            self._end(row)
            return
        row.again = False
        row.state = RowState.WAITING
        row.preempted += 1
        self.enqueue(row)

    @staticmethod
    def _end(row: Row) -> None:
        row.state = RowState.ENDED
        for holding in row.reads:
            holding.release()
