"""A lane: one stage with its waiting and its running rows, and the rule that fills a plan.

Running rows first, each catches up to where it wants to be within the launch's budget; then new rows. On no room the
newest row of the lowest priority is preempted, never the last one; preempted rows recompute. That one rule covers
chunked prefill, prefix hits, encoder passes and denoising steps.
"""

from __future__ import annotations

import bisect
import time

from polymux.core.batch.cost import LaunchCost
from polymux.core.batch.plan import Grant, Plan
from polymux.core.batch.residency import Residency
from polymux.core.batch.row import Row, RowState
from polymux.core.batch.stage import Stage
from polymux.core.cache.arena import Arena

SHORTEST, LONGEST = 0.3, 1.5
"""Of a slice of time: how short and how long a launch with long work may be while streams run."""

SHARE = 0.4
"""Of all long work that waits: what a launch takes of it, within those bounds. With little waiting, streams hardly
notice; with much, prompts must not wait for what every launch costs anyhow. Chosen in `benchmarks/scheduling.py`."""


def _rank(row: Row) -> tuple[int, bool, int]:
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
        self.guessed = 0
        """Tokens that speculation guessed ahead; so many were right:"""
        self.accepted = 0
        self.virtual_ms = 0.0
        """Device time this lane has had, for fairness between lanes."""
        self.cost = LaunchCost()

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
        if self.stage.on_host and self.inflight >= self.stage.abreast:
            return False
        return bool(self.waiting) or any(self.stage.want(row) for row in self.running)

    @property
    def gathers(self) -> bool:
        """Whether all that it could run is new rows, and some more may share their launch if that waits a little."""
        if not self.waiting or not self.stage.patience_ms:
            return False
        oldest = min(row.queued_at for row in self.waiting)
        if time.monotonic() - oldest >= self.stage.patience_ms / 1e3:
            return False
        return sum(map(self.stage.want, self.waiting)) < self.stage.max_units

    # ---- plan ----

    def plan(self, slice_ms: float, crowded: bool, *, admits: bool = True) -> Plan | None:
        """The next launch, or None; where it does not admit, of running rows alone.

        Its long work is cut to a slice of time when it is `crowded` (another lane wants the device), and when rows
        that take short steps are not outnumbered by the others: a long prompt must not hold up the streams that run.
        """
        if self.stage.arranges:
            self._seat()
            self.stage.arrange(self.running, self.cost)
        grants: list[Grant] = []
        skipped, budget = self._run(slice_ms, crowded, grants)
        # room that preempted rows make belongs to the rows that needed it
        if admits and not any(row.again for row in self.retiring) and not (skipped and not grants):
            self._admit(budget, grants)
        if not grants:
            return None
        if skipped:  # groups that cannot share a launch take turns
            granted = {grant.row for grant in grants}
            self.running.sort(key=lambda row: row in granted)
        for grant in grants:
            grant.row.inflight += 1
        return Plan(self.stage.name, grants)

    def charge(self, ms: float, plan: Plan) -> None:
        """The plan's launch took `ms`."""
        self.virtual_ms += ms
        self.cost.learn(sum(grant.count for grant in plan.grants if grant.count >= self.stage.least_units), ms)

    def _budget(self, ms: float) -> int:
        """Units of long work that a launch of so many milliseconds has room for."""
        return int(max(self.stage.least_units, min(self.stage.max_units, self.cost.units_within(ms))))

    def _patience(self, slice_ms: float, long: int) -> float:
        """Milliseconds that a launch may keep streams waiting while `long` units of long work wait for it."""
        return min(max(SHORTEST * slice_ms, self.cost.milliseconds(int(SHARE * long))), LONGEST * slice_ms)

    def _even(self, room: int, short: int) -> int:
        """`room` for long work beside `short` units, less what would begin one grain more."""
        even = room - (room + short) % self.stage.grain
        return even if even >= self.stage.least_units else room

    def _run(self, slice_ms: float, crowded: bool, grants: list[Grant]) -> tuple[bool, int]:
        """Grants for running rows: whether a row was left out because it cannot share the launch, and the units that
        are left for new rows."""
        least, want = self.stage.least_units, self.stage.want
        wants = [(row, wanted) for row in self.running if (wanted := want(row)) > 0]
        short = [wanted for _, wanted in wants if wanted < least]
        long = [wanted for _, wanted in wants if wanted >= least]
        budget = self.stage.max_units
        room = budget - sum(short)
        if crowded:
            room = min(room, self._budget(slice_ms))
        elif len(short) >= len(long) + len(self.waiting):
            waiting = sum(long) + sum(self.stage.want(row) for row in self.waiting)
            room = min(room, self._budget(self._patience(slice_ms, waiting)))
        room = self._even(room, sum(short))
        skipped = False
        for row, wanted in wants:
            units = self.stage.cut(row, wanted, budget if wanted < least else room)
            if units <= 0 or row.state is not RowState.RUNNING:
                continue
            if grants and not self.stage.compatible(grants[0].row, row):
                skipped = True
                continue
            if self._make_room(row, self.stage.reach(row, units)):
                grants.append(self.stage.grant(row, units))
                budget -= units
                room -= units if wanted >= least else 0
        return skipped, min(budget, room)

    def _admit(self, budget: int, grants: list[Grant]) -> None:
        for row in list(self.waiting):
            if budget <= 0:
                break
            if self.residency.awaits(row):
                continue
            if not self._take(row):
                break
            if self.stage.complete(row):
                self.answered.append(row)
                continue
            units = self.stage.cut(row, self.stage.want(row), budget)
            if units <= 0 or not self.residency.grow(row, self.stage.reach(row, units)):
                continue
            if not grants or self.stage.compatible(grants[0].row, row):  # else its group's turn comes
                grants.append(self.stage.grant(row, units))
                budget -= units

    def _seat(self) -> None:
        """Give every waiting row its slot, as far as there are any."""
        for row in list(self.waiting):
            if not self._take(row):
                break

    def _take(self, row: Row) -> bool:
        """Admit a waiting row; False when it finds no room."""
        if not self.residency.admit(row, alone=not self.running):
            return False
        self.waiting.remove(row)
        row.state = RowState.RUNNING
        if row.admitted_at is None:
            row.admitted_at = time.monotonic()
        bisect.insort(self.running, row, key=_rank)
        return True

    def _make_room(self, row: Row, units: int) -> bool:
        """Blocks for the row's first `units` units, taken from others if they must be."""
        while not self.residency.grow(row, units):
            if self.retiring or len(self.running) == 1:
                return False  # room is on its way, or only other lanes can give it
            victim = self.running[-1]
            self.preempt(victim)
            if victim is row:
                return False
        return True

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
