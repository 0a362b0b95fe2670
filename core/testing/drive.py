"""Drives a `Loop` by hand in tests: submit works, step, cancel at a step of your choice, read reports by job.

driver = Driver(loop)
driver.submit("one", "model", "chat", work)
driver.run(steps=3)
driver.cancel("one")
driver.finish()                       # runs to idle, then proves that the engine holds nothing
assert driver.tokens("one") == [...]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from polymux.core.engine.loop import Loop
from polymux.core.engine.wire import pack, unpack
from polymux.core.errors import InternalError, PolymuxError
from polymux.core.vocabulary import BranchEnded, Cancel, Ended, Event, Failed, Output, Post, Receipt, Submit, Tokens

T = TypeVar("T", bound=msgspec.Struct)

LIMIT = 20_000
"""Steps after which a loop that is still busy is taken for stuck."""


class Driver:
    """One loop and everything it has reported, by job, in order."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.steps = 0
        self.reports: defaultdict[str, list[Event]] = defaultdict(list)

    # ---- commands ----

    def submit(self, job: str, model: str, task: str, work: msgspec.Struct, **options: Any) -> None:
        """`options` are those of `Submit`: priority, deadline."""
        self.loop.handle(Submit(job, model, task, pack(work, holder=job), **options))

    def cancel(self, job: str, branch: int | None = None) -> None:
        """Give up a job, or one branch of it."""
        self.loop.handle(Cancel(job, branch))

    def post(self, job: str, body: msgspec.Struct) -> None:
        """Send a message to a running job."""
        self.loop.handle(Post(job, pack(body, holder=job)))

    # ---- stepping ----

    def step(self) -> bool:
        """One step of the loop; False when it has nothing to do."""
        busy = self.loop.step()
        self.steps += 1
        for report in self.loop.take_reports():
            self.reports[report.job].append(report)
        return busy

    def run(self, steps: int = LIMIT) -> None:
        """Step until the loop is idle, or `steps` times. Raises `InternalError` for a loop that never gets idle."""
        for _ in range(steps):
            if not self.step():
                return
        if steps == LIMIT:
            raise InternalError(f"the loop is still busy after {LIMIT} steps: {self.loop.stats()}")

    def run_until_token(self, job: str, count: int = 1) -> None:
        """Step until the job has reported `count` tokens, over all its branches."""
        while sum(len(report.ids) for report in self.reports[job] if isinstance(report, Tokens)) < count:
            if not self.step():
                raise InternalError(f"the loop is idle and job {job} has not reported {count} tokens")

    def finish(self) -> None:
        """Run to idle, then raise `InternalError` unless the engine holds no job, row, slot or block."""
        self.run()
        self.loop.check_integrity()

    # ---- reports ----

    def tokens(self, job: str, branch: int = 0) -> list[int]:
        """Every token that a branch of the job has reported."""
        return [id for report in self._tokens(job, branch) for id in report.ids]

    def logprobs(self, job: str, branch: int = 0) -> list[float]:
        """The log probability of each of them."""
        return [value for report in self._tokens(job, branch) for value in report.logprobs or ()]

    def top(self, job: str, branch: int = 0) -> list[list[tuple[int, float]]]:
        """Per token, the best alternatives as (id, logprob)."""
        return [best for report in self._tokens(job, branch) for best in report.top or ()]

    def reasons(self, job: str) -> dict[int, str]:
        """Why each branch ended."""
        ends = [report for report in self.reports[job] if isinstance(report, BranchEnded)]
        return {report.branch: report.reason for report in ends}

    def outputs(self, job: str, kind: str, type: type[T]) -> list[T]:
        """What the job emitted of one kind, decoded."""
        return [
            unpack(report.body, type)
            for report in self.reports[job]
            if isinstance(report, Output) and report.kind == kind
        ]

    def receipt(self, job: str) -> Receipt | None:
        """The receipt of a job that ended well; None for one that runs, failed or was cancelled."""
        last = self._last(job)
        return last.receipt if isinstance(last, Ended) else None

    def error(self, job: str) -> PolymuxError | None:
        """The error of a job that failed."""
        last = self._last(job)
        return PolymuxError.from_wire(last.error) if isinstance(last, Failed) else None

    def _tokens(self, job: str, branch: int) -> list[Tokens]:
        return [report for report in self.reports[job] if isinstance(report, Tokens) and report.branch == branch]

    def _last(self, job: str) -> Event | None:
        return self.reports[job][-1] if self.reports[job] else None


def run_jobs(loop: Loop, submits: Iterable[Submit]) -> dict[str, list[Event]]:
    """Submit all at once, run to idle, prove that nothing leaked; the reports by job."""
    driver = Driver(loop)
    for submit in submits:
        loop.handle(submit)
    driver.finish()
    return dict(driver.reports)
