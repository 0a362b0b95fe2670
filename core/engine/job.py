"""A job: one request's work, a coroutine that awaits stages, loops, forks and has an inbox.

Programs are ordinary coroutines, but nothing of asyncio runs here: a strand is resumed by the loop when the signal it
waits for is set. Rows report tokens by themselves, so a strand wakes when a row ends, not for every token.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from polymux.core.batch.row import Row, Signal
from polymux.core.engine.wire import pack
from polymux.core.errors import PolymuxError
from polymux.core.vocabulary import Output, Receipt, Report

if TYPE_CHECKING:
    from polymux.core.batch.stage import Stage
    from polymux.core.cache.holding import Holding

R = TypeVar("R", bound=Row)

log = logging.getLogger("polymux.engine")


class Strand:
    """One coroutine of a job. `finished` carries its return value or its error."""

    def __init__(self, job: Job, coroutine: Coroutine[Signal, None, Any]) -> None:
        self.job = job
        self.finished = Signal()
        self._coroutine = coroutine

    def wake(self) -> None:
        self.job.host.ready.append(self)

    def resume(self) -> None:
        """Run until the next signal that is not set yet."""
        if self.finished.done:
            return
        try:
            signal = self._coroutine.send(None)
        except StopIteration as stop:
            self.finished.set(stop.value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.finished.fail(error)
        else:
            if isinstance(signal, Signal):
                signal.waiters.append(self)
            else:
                self._close()
                self.finished.fail(TypeError("a program awaits rows and signals of its job, nothing of asyncio"))

    def close(self) -> None:
        if not self.finished.done:
            self._close()
            self.finished.set()

    def _close(self) -> None:
        try:
            self._coroutine.close()
        except Exception:  # a clean-up that fails, or awaits, is the job's own trouble
            log.exception("job %s did not clean up", self.job.id)


class JobHost:
    """What a job needs of the loop: a queue of strands to resume, a place for reports, and the lanes."""

    def __init__(self, enqueue: Callable[[Stage, Row], None], withdraw: Callable[[Stage, Row], None]) -> None:
        self.ready: deque[Strand] = deque()
        self.reports: list[Report] = []
        self.enqueue = enqueue
        self.withdraw = withdraw


class Job:
    """What a program sees of its request."""

    def __init__(self, host: JobHost, id: str, task: str, *, priority: int = 0, deadline: float | None = None) -> None:
        self.host = host
        self.id = id
        self.task = task
        self.priority = priority
        self.arrived = time.monotonic()
        self.expires = self.arrived + deadline if deadline is not None else None
        self.over = False
        self.receipt = Receipt()
        self.rows: dict[Row, Stage] = {}
        self.holdings: list[Holding] = []
        self.strands: list[Strand] = []
        self._inbox: deque[msgspec.Raw] = deque()
        self._posted = Signal()

    # ---- for programs ----

    def start(self, stage: Stage, row: R) -> R:
        """Put a row into a stage's queue. `await row` gives it back once it ended, or raises its error."""
        self.rows[row] = stage
        for holding in row.reads:
            holding.hold()
        self.host.enqueue(stage, row)
        return row

    def stop(self, row: Row) -> None:
        """Give up a row early; its slot and blocks are free within a step."""
        stage = self.rows.pop(row, None)
        if stage is not None:
            self.host.withdraw(stage, row)
            row.end()

    def drop(self, holding: Holding) -> None:
        """Give up what a row left behind, before the job ends; rows that read it keep it until they end."""
        self.holdings.remove(holding)
        holding.release()

    def emit(self, kind: str, body: msgspec.Struct) -> None:
        """Tell the caller something: the pipeline's front decodes `body` by its kind."""
        self.mark_first()
        self.host.reports.append(Output(self.id, kind, pack(body)))

    def spawn(self, coroutine: Coroutine[Signal, None, Any]) -> Signal:
        """Run a coroutine beside this one; awaiting the signal gives its value or raises its error."""
        strand = Strand(self, coroutine)
        self.strands.append(strand)
        strand.wake()
        return strand.finished

    async def receive(self) -> msgspec.Raw:
        """The next message posted to this job, in order."""
        while not self._inbox:
            if self._posted.done:
                self._posted = Signal()
            await self._posted
        return self._inbox.popleft()

    @property
    def posted(self) -> bool:
        """Whether a message is there already: `receive` does not wait then."""
        return bool(self._inbox)

    # ---- for the loop ----

    def post(self, body: msgspec.Raw) -> None:
        """A message for the program has arrived."""
        self._inbox.append(body)
        self._posted.set()

    def own(self, holding: Holding) -> None:
        """Keep what a row left behind until the job drops it or ends."""
        self.holdings.append(holding)

    def mark_first(self) -> None:
        """The caller sees something of this job: the first time is noted."""
        if not self.receipt.first_ms:
            self.receipt.first_ms = (time.monotonic() - self.arrived) * 1e3

    def end_row(self, row: Row, error: PolymuxError | None = None) -> None:
        """A row is through, or failed with an error."""
        self.rows.pop(row, None)
        if row.admitted_at is not None:
            self.receipt.queued_ms = max(self.receipt.queued_ms, (row.admitted_at - row.queued_at) * 1e3)
        row.end(error)

    def finish(self) -> None:
        """Stop every strand and give up every row. Idempotent."""
        if self.over:
            return
        self.over = True
        self.receipt.total_ms = (time.monotonic() - self.arrived) * 1e3
        for strand in self.strands:
            strand.close()
        for row, stage in list(self.rows.items()):
            self.host.withdraw(stage, row)
        self.rows.clear()
        for holding in self.holdings:
            holding.release()
        self.holdings.clear()
