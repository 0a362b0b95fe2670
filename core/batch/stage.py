"""A stage: one kind of forward pass that many rows share, as a few verbs. Everything else is derived from them.

    want      units a row could run now
    launch    enqueue one forward pass and its sampling or update; never waits for the device
    join      the second half of a launch: what needs the previous launch's results on the host
    collect   the results, later: launch k+1 may already be out; host state advances only here

The three families are `tokens.TokenStage`, `oneshot.OneShotStage` and `denoise.DenoiseStage`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from polymux.core.batch.cost import LaunchCost
from polymux.core.batch.plan import Grant, Plan
from polymux.core.batch.row import Row
from polymux.core.cache.blocks import CacheSpec
from polymux.core.errors import PolymuxError
from polymux.core.vocabulary import Report


@dataclass(slots=True)
class Ticket:
    """One launch in flight. `results` is the stage's own; `work` is set when the pass runs beside the device."""

    plan: Plan
    results: Any = None
    joins: bool = False
    """The launch stopped before its join: `join` must follow once the earlier launches are collected."""
    work: Future[Any] | None = None
    launched_at: float = 0.0

    @property
    def ready(self) -> bool:
        return self.work is None or self.work.done()


@dataclass(slots=True)
class Outcomes:
    """What one launch brought: reports to publish, rows that ended, rows that failed alone, what guesses were worth."""

    reports: list[Report] = field(default_factory=list)
    ended: list[Row] = field(default_factory=list)
    failed: list[tuple[Row, PolymuxError]] = field(default_factory=list)
    guessed: int = 0
    """Tokens that speculation guessed ahead; so many were right:"""
    accepted: int = 0


class Stage(ABC):
    """One kind of forward pass. The lane admits and releases rows; the stage only runs them."""

    name: str
    cache: CacheSpec | None = None
    """The paged class whose blocks a row takes as it grows."""
    shares_prefixes = False
    """Whether full blocks may be shared between rows by content."""
    on_host = False
    """The pass runs on the host beside the device (a vocoder in another runtime)."""
    abreast = 1
    """Passes on the host that may be under way at once."""
    max_rows = 1
    """Rows that may hold a slot at once."""
    max_units = 1
    """Units one launch may run."""
    least_units = 1
    """Units a launch runs even when it is cut to a slice of time."""
    grain = 1
    """Units that cost no more than one of them: a launch is cut to a multiple of so many."""
    head_start_ms = 0.0
    """Device time that its lane may have had more than others and still go first: it feeds another stage, and a launch
    of that costs less a row the more rows it has."""
    patience_ms = 0.0
    """How long new rows may wait for company while others use the device: what a launch costs anyhow is then shared."""
    indivisible = False
    """What a row wants runs whole: one above the budget runs with what is left of it."""

    def warm(self) -> None:
        """Do now what would make the first launches slow: compile kernels, record graphs."""

    def tend(self) -> bool:
        """Nothing runs: do a little of what will make later launches faster. True while there is more."""
        return False

    @abstractmethod
    def want(self, row: Row) -> int:
        """Units the row could run now; 0 while it waits for results or input."""

    def units(self, row: Row) -> int:
        """Units that the row's blocks must hold for its next launch."""
        return 0

    def reach(self, row: Row, units: int) -> int:
        """Units that the row's blocks must hold once so many more are granted."""
        return row.scheduled + units

    def admitted(self, row: Row) -> None:
        """The row got its slot: bring its parameters to the device."""

    def released(self, row: Row) -> None:
        """The row gives its slot back: forget its parameters."""

    arranges = False
    """The stage puts its rows in order before every launch. They then get a slot as soon as there is one, also when the
    next launch has no room for them: whoever is urgent need not wait until others have ended."""

    def arrange(self, rows: list[Row], cost: LaunchCost) -> None:
        """Sort running rows, the most urgent first. `cost` is what launches of this stage have been found to cost."""

    def cut(self, row: Row, wanted: int, budget: int) -> int:
        """What of its units a row may run now. One that cannot be cut takes all or, without any budget, none."""
        return wanted if self.indivisible and budget > 0 else min(wanted, budget)

    def grant(self, row: Row, units: int) -> Grant:
        """Put up to `units` of the row's work into a plan, and count what the device will know before the host."""
        grant = Grant(row, row.scheduled, units)
        row.scheduled += units
        return grant

    def compatible(self, first: Row, row: Row) -> bool:
        """Whether the two may share a launch (same resolution, same adapter)."""
        return True

    def complete(self, row: Row) -> bool:
        """Whether all that a row wants was there when it was admitted: it ends without a launch."""
        return False

    @abstractmethod
    def launch(self, plan: Plan) -> Ticket: ...

    def join(self, ticket: Ticket) -> None:
        """Finish a launch whose `joins` is set."""

    @abstractmethod
    def collect(self, ticket: Ticket) -> Outcomes: ...
