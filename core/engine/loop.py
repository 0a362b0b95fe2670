"""The engine's one loop: plan, launch, collect, publish. No modality has another.

With a device of depth 2, launch k+1 goes out before launch k is collected. A launch that fails is halved until the
guilty row is alone; it fails with a clear error and the rest go on.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, wait

import torch

from polymux.core.batch.lane import Lane
from polymux.core.batch.plan import Plan
from polymux.core.batch.row import Row
from polymux.core.batch.scheduler import Scheduler
from polymux.core.batch.sequence import TokenRow
from polymux.core.batch.stage import Outcomes, Stage, Ticket
from polymux.core.engine.faults import explain_fault
from polymux.core.engine.job import Job, JobHost, Strand
from polymux.core.engine.site import Site
from polymux.core.engine.wire import discard, unpack
from polymux.core.errors import (
    ContextTooLong,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    PolymuxError,
)
from polymux.core.pipeline import Program
from polymux.core.vocabulary import Cancel, Command, Ended, Failed, Post, Report, Submit, Tokens

log = logging.getLogger("polymux.engine")

HOST_WAIT = 0.005
"""Seconds to wait for a pass on the host when the device has nothing to do."""


class Loop:
    """Runs the jobs of any number of programs on one site. Single-threaded: call from one thread only."""

    def __init__(self, site: Site, programs: Mapping[str, Program], quiet: float = 0.0) -> None:
        """`quiet`: seconds of rest after which later launches are prepared, so that whoever comes after a short pause
        does not wait for that. Whoever drives the loop then steps now and again while it rests."""
        self.site = site
        self.programs = dict(programs)
        stages: list[Stage] = []
        for model, program in self.programs.items():
            for stage in program.stages:
                stage.name = f"{model}/{stage.name}"
                stages.append(stage)
        self.scheduler = Scheduler(stages, site.arena, site.settings.slice_ms)
        self.host = JobHost(self.scheduler.enqueue, self._withdraw)
        self.jobs: dict[str, Job] = {}
        self.launches = 0
        self.tokens = 0
        self.failures = 0
        self._roots: dict[Strand, Job] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._inflight: deque[tuple[Lane, Ticket]] = deque()
        self._beside: list[tuple[Lane, Ticket]] = []
        self._collected_at = 0.0
        self._quiet = quiet
        self._tending = True
        self._resting: float | None = None
        """Since when nothing runs."""

    # ---- commands ----

    def handle(self, command: Command) -> None:
        """Take a command from the gateway. What is wrong with it becomes a `Failed` report, never an exception."""
        match command:
            case Submit():
                self._submit(command)
            case Cancel():
                self._cancel(command)
            case Post():
                job = self.jobs.get(command.job)
                if job is not None:
                    job.post(command.body)
                else:
                    discard(command.body)

    def take_reports(self) -> list[Report]:
        reports, self.host.reports = self.host.reports, []
        return reports

    def _submit(self, submit: Submit) -> None:
        program = self.programs.get(submit.model)
        if program is None or submit.task not in program.work:
            self._report_failure(submit.job, InvalidRequest(f"this engine does not serve {submit.task} {submit.model}"))
            return
        try:
            work = unpack(submit.work, program.work[submit.task])
        except Exception as error:
            self._report_failure(submit.job, InternalError(f"malformed work for {submit.model}: {error}"))
            return
        job = Job(self.host, submit.job, submit.task, priority=submit.priority, deadline=submit.deadline)
        try:
            root = Strand(job, program.run(job, work))
        except Exception as error:
            log.error("job %s could not start", job.id, exc_info=error)
            self._report_failure(job.id, explain_fault(error))
            return
        self.jobs[job.id] = job
        if job.expires is not None:
            heapq.heappush(self._deadlines, (job.expires, job.id))
        job.strands.append(root)
        self._roots[root] = job
        root.wake()

    def _cancel(self, cancel: Cancel) -> None:
        job = self.jobs.get(cancel.job)
        if job is None:
            return
        if cancel.branch is None:
            self._end(job)
            return
        for row in [row for row in job.rows if row.branch == cancel.branch]:
            job.stop(row)

    # ---- one iteration ----

    def step(self) -> bool:
        """Plan, launch, collect. True while there is more to do at once."""
        self._expire()
        self._resume()
        planned = self.scheduler.plan(busy=bool(self._inflight))
        self._answer()
        if planned is not None:
            self._launch(*planned)
        else:
            self.site.device.drained()
            if not self._inflight and not self._beside and not self.host.ready:
                self._break_deadlock()
            elif self._beside and not self._inflight:
                wait([ticket.work for _, ticket in self._beside if ticket.work], HOST_WAIT, FIRST_COMPLETED)
        while len(self._inflight) > (self.site.device.depth - 1 if planned is not None else 0):
            self._collect(*self._inflight.popleft())
        for lane, ticket in [entry for entry in self._beside if entry[1].ready]:
            self._beside.remove((lane, ticket))
            self._collect(lane, ticket)
        self._resume()
        busy = bool(self._inflight or self._beside or self.host.ready or planned) or self._waiting()
        if busy:
            self._resting = None
        return busy or (self._tending and self._tend())

    def _launch(self, lane: Lane, plan: Plan) -> None:
        started = time.monotonic()
        try:
            ticket = lane.stage.launch(plan)
        except torch.AcceleratorError:
            raise  # the device's context is lost: the process must be replaced
        except Exception as error:
            self._halve(lane, plan, error)
            return
        ticket.launched_at = started
        self.launches += 1
        lane.inflight += 1
        if ticket.work is not None:
            self._beside.append((lane, ticket))
            return
        self.site.device.launched()
        if ticket.joins:
            while self._inflight:
                self._collect(*self._inflight.popleft())
            try:
                lane.stage.join(ticket)
            except torch.AcceleratorError:
                raise
            except Exception as error:
                lane.inflight -= 1
                self._halve(lane, plan, error)
                return
            self.site.device.launched()  # its second half is one more
        self._inflight.append((lane, ticket))

    def _halve(self, lane: Lane, plan: Plan, error: Exception) -> None:
        """Find the guilty row. A launch changes nothing that running it again would not set again."""
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        if len(plan.grants) > 1:
            for half in plan.halve():
                self._launch(lane, half)
            return
        self._fail_plan(lane, plan, error)

    def _fail_plan(self, lane: Lane, plan: Plan, error: Exception) -> None:
        log.warning("%s: %d row(s) failed", lane.stage.name, len(plan.grants), exc_info=error)
        for grant in plan.grants:
            self._fail_row(lane, grant.row, explain_fault(error))
            lane.settle(grant.row)

    def _collect(self, lane: Lane, ticket: Ticket) -> None:
        lane.inflight -= 1
        try:
            outcomes = lane.stage.collect(ticket)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            if any(grant.row.inflight > 1 for grant in ticket.plan.grants):
                self._fail_plan(lane, ticket.plan, error)  # a later launch already builds on this one
            else:
                self._halve(lane, ticket.plan, error)
            return
        now = time.monotonic()
        if ticket.work is None:
            lane.charge((now - max(ticket.launched_at, self._collected_at)) * 1e3, ticket.plan)
            self._collected_at = now
        for job in {grant.row.job for grant in ticket.plan.grants}:
            job.receipt.launches += 1
        publish = lane.residency.publish
        for grant in ticket.plan.grants:
            if not grant.row.job.over:
                publish(grant.row)
        self._apply(lane, outcomes)
        for grant in ticket.plan.grants:
            lane.settle(grant.row)

    def _apply(self, lane: Lane, outcomes: Outcomes) -> None:
        for report in outcomes.reports:
            if isinstance(report, Tokens):
                self.tokens += len(report.ids)
                job = self.jobs[report.job]
                if not job.receipt.first_ms:
                    job.mark_first()
        self.host.reports += outcomes.reports
        lane.guessed += outcomes.guessed
        lane.accepted += outcomes.accepted
        for row in outcomes.ended:
            lane.withdraw(row)
            row.job.end_row(row)
        for row, error in outcomes.failed:
            self._fail_row(lane, row, error)

    def _answer(self) -> None:
        for lane in self.scheduler.lanes.values():
            answered, lane.answered = lane.answered, []
            for row in answered:
                lane.withdraw(row)
                row.job.end_row(row)

    # ---- programs ----

    def _resume(self) -> None:
        ready = self.host.ready
        while ready:
            strand = ready.popleft()
            strand.resume()
            job = self._roots.get(strand)
            if job is not None and strand.finished.done:
                self._finish(job, strand.finished.error)

    def _finish(self, job: Job, error: BaseException | None) -> None:
        self._end(job)
        if error is None:
            self.host.reports.append(Ended(job.id, job.receipt))
            return
        if not isinstance(error, PolymuxError):
            log.error("%s job %s failed", job.task, job.id, exc_info=error)
        self._report_failure(job.id, explain_fault(error))

    def _end(self, job: Job) -> None:
        job.finish()
        self.jobs.pop(job.id, None)
        for strand in job.strands:
            self._roots.pop(strand, None)

    def _report_failure(self, job: str, error: PolymuxError) -> None:
        self.failures += 1
        self.host.reports.append(Failed(job, error.to_wire()))

    def _withdraw(self, stage: Stage, row: Row) -> None:
        self.scheduler.lane(stage).withdraw(row)

    def _fail_row(self, lane: Lane, row: Row, error: PolymuxError) -> None:
        lane.residency.taint(row)
        lane.withdraw(row)
        if not row.job.over:
            row.job.end_row(row, error)

    def _expire(self) -> None:
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            job = self.jobs.get(heapq.heappop(self._deadlines)[1])
            if job is not None:
                self._finish(job, DeadlineExceeded("the request's deadline passed before it was answered"))

    def _tend(self) -> bool:
        """Nothing runs. What goes wrong now costs speed, and no request."""
        now = time.monotonic()
        if self._resting is None:
            self._resting = now
        if now - self._resting < self._quiet:
            return False
        try:
            self._tending = self.scheduler.tend()
        except torch.AcceleratorError:
            raise
        except Exception:
            log.exception("preparing later launches failed")
            self._tending = False
        return self._tending

    def _waiting(self) -> bool:
        return any(lane.waiting or lane.running for lane in self.scheduler.lanes.values())

    def _break_deadlock(self) -> None:
        stuck = self.scheduler.make_room()
        if stuck is None:
            return
        lane, row = stuck
        error: PolymuxError = Overloaded("the request needs more cache than others leave; try again")
        if len(self.jobs) == 1 or lane.stage.units(row) > lane.residency.capacity:  # nobody will ever leave it enough
            needs = "the request needs more cache than this engine has; use a shorter context"
            error = ContextTooLong(needs) if isinstance(row, TokenRow) else InvalidRequest(needs)
        self._fail_row(*stuck, error)

    def close(self) -> None:
        """The engine stops: every program gives back what it took. One that fails to must not keep the others."""
        for model, program in self.programs.items():
            try:
                program.close()
            except Exception:
                log.exception("model %s did not close", model)

    # ---- insight ----

    def stats(self) -> dict[str, float]:
        arena = self.site.arena
        return {
            "jobs_running": len(self.jobs),
            **self.scheduler.stats(),
            "cache_usage_ratio": 1 - arena.free / arena.total,
            "launches_total": self.launches,
            "generation_tokens_total": self.tokens,
            "job_failures_total": self.failures,
        }

    def check_integrity(self) -> None:
        """Raise `InternalError` unless an idle engine holds nothing. For tests, and for an idle engine."""
        if self.jobs or self._inflight or self._beside or self._roots:
            raise InternalError("the engine is not idle")
        self.scheduler.check()
