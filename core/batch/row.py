"""A row: one unit of batching inside a stage, (job, branch). It owns a device slot while it runs.

    WAITING   in the lane's queue, holds nothing
    RUNNING   holds a slot and blocks
    RETIRING  ended or preempted, but a launch in flight still names its slot and blocks
    ENDED     holds nothing, result set

`scheduled` counts units of work handed to launches, `done` those whose results the host has seen.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polymux.core.cache.holding import Holding
    from polymux.core.engine.job import Job

_numbers = itertools.count()


class RowState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    RETIRING = "retiring"
    ENDED = "ended"


class Signal:
    """A one-shot future for programs: `await signal` parks the strand until `set` or `fail`."""

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.waiters: list[Any] = []

    def set(self, value: Any = None) -> None:
        if not self.done:
            self.done, self.value = True, value
            self._wake()

    def fail(self, error: BaseException) -> None:
        if not self.done:
            self.done, self.error = True, error
            self._wake()

    def _wake(self) -> None:
        waiters, self.waiters = self.waiters, []
        for strand in waiters:
            strand.wake()

    def __await__(self) -> Generator[Signal, None, Any]:
        if not self.done:
            yield self
        if self.error is not None:
            raise self.error
        return self.value


class Row:
    """What every family's row has. Awaiting it gives the row itself once it ended, or raises its error."""

    def __init__(self, job: Job, branch: int = 0) -> None:
        self.number = next(_numbers)
        self.job = job
        self.branch = branch
        self.state = RowState.WAITING
        self.slot = -1
        self.blocks: list[int] = []
        self.scheduled = 0
        self.done = 0
        self.inflight = 0
        """Launches in flight that name this row; what it holds is freed only when none does."""
        self.again = False
        """RETIRING because of a preemption: it goes back to the queue instead of ending."""
        self.reads: list[Holding] = []
        """What other rows left on the device for this one; set before the row starts."""
        self.keeps = False
        """When the row ends, its blocks become `holding` and belong to the job."""
        self.holding: Holding | None = None
        self.preempted = 0
        """How often it made room for others and began again."""
        self.urgent = False
        """Somebody waits for this one: it runs before the others of its priority."""
        self.ended = Signal()
        self.queued_at = time.monotonic()
        self.admitted_at: float | None = None

    @property
    def rank(self) -> tuple[int, bool, int]:
        """Smaller runs first: the job's priority, then what is urgent, then the order of arrival."""
        return (-self.job.priority, not self.urgent, self.number)

    def end(self, error: BaseException | None = None) -> None:
        """Wake whoever waits for this row."""
        if error is None:
            self.ended.set()
        else:
            self.ended.fail(error)

    def __await__(self) -> Generator[Signal, None, Any]:
        yield from self.ended.__await__()
        return self
