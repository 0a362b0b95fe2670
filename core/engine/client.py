"""An engine as the event loop sees it: submit jobs, read their events. Where it runs is the subclass's business.

Subclasses: `core.engine.supervisor.EngineProcess` (a process of its own, restarted when it dies) and
`core.testing.engine.LocalEngine` (a thread of this process, for tests).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from polymux.core.engine.lease import process_pool
from polymux.core.engine.stream import EventStream
from polymux.core.engine.wire import discard
from polymux.core.errors import NotReady, Overloaded, PolymuxError
from polymux.core.vocabulary import (
    Cancel,
    Command,
    Complaint,
    Ended,
    Failed,
    LoadFailed,
    Output,
    Post,
    Ready,
    Report,
    Stats,
    Submit,
)

MOST_JOBS = 4096


class Engine(ABC):
    """One engine. All methods belong to the event loop that called `start`."""

    def __init__(self, name: str, *, most_jobs: int = MOST_JOBS) -> None:
        self.name = name
        self.most_jobs = most_jobs
        self.state = "loading"
        """loading, ready, restarting or stopped."""
        self.failure: PolymuxError | None = None
        """Why the engine is stopped, unless it was told to."""
        self.models: dict[str, dict[str, Any]] = {}
        """Facts of each loaded model, from the engine's `Ready` report."""
        self.plugins: dict[str, Complaint] = {}
        """What went wrong with plugins over there, from the same report."""
        self.stats: dict[str, float] = {}
        """The engine's own gauges and counters, about a second old."""
        self._streams: dict[str, EventStream] = {}
        self._expected = 0
        self._heard = time.monotonic()

    @abstractmethod
    async def start(self) -> None:
        """Begin loading and return at once; `wait_ready` waits for the end of it."""

    @abstractmethod
    async def wait_ready(self) -> None:
        """Wait until jobs are accepted. Raises what stopped the engine: `ModelError` when a model does not load."""

    @abstractmethod
    async def stop(self) -> None:
        """End the engine; jobs that still run end with `NotReady`."""

    @abstractmethod
    def send(self, command: Command) -> None:
        """Hand a command to the engine without waiting."""

    def submit(self, submit: Submit) -> EventStream:
        """Start a job and return its events. Raises `NotReady`, or `Overloaded` when too many jobs are under way."""
        self.check_ready()
        if len(self._streams) >= self.most_jobs:
            raise Overloaded(f"engine {self.name} already has {self.most_jobs} requests; retry later")
        stream = EventStream(submit.job, self.cancel)
        self._streams[submit.job] = stream
        try:
            self.send(submit)
        except BaseException:
            self._forget(submit.job)
            raise
        return stream

    def check_ready(self) -> None:
        """Raise `NotReady`, saying why, unless jobs are accepted."""
        if self.state != "ready":
            raise self._not_ready()

    def cancel(self, job: str) -> None:
        """Stop a job within a step. Its events end here and now; cancelling an unknown job is no error."""
        stream = self._forget(job)
        if stream is not None:
            stream.close()
            if self.state == "ready":
                self.send(Cancel(job))

    def stop_branch(self, job: str, branch: int) -> None:
        """Stop one branch of a running job; the others go on."""
        if job in self._streams:
            self.send(Cancel(job, branch))

    def post(self, job: str, body: msgspec.Raw) -> None:
        """Put a message into a running job's inbox; one for a job that is over is dropped."""
        if job in self._streams:
            self.send(Post(job, body))
        else:
            discard(body)

    @property
    def jobs(self) -> int:
        """Jobs under way: submitted, and neither ended nor cancelled."""
        return len(self._streams)

    @contextmanager
    def expect(self) -> Iterator[None]:
        """A request for this engine is being prepared. Raises `NotReady`, as `check_ready` does."""
        self.check_ready()
        self._expected += 1
        try:
            yield
        finally:
            self._expected -= 1

    @property
    def idle(self) -> bool:
        """No job is under way, and none is about to be."""
        return not self._streams and not self._expected

    @property
    def silence(self) -> float:
        """Seconds since the engine last said anything. It speaks between steps, and a long step is legal."""
        return time.monotonic() - self._heard

    def describe(self) -> dict[str, Any]:
        failure = self.failure.message if self.failure else None
        return {"name": self.name, "state": self.state, "failure": failure, "jobs": self.jobs, "models": self.models}

    def _deliver(self, reports: Sequence[Report]) -> None:
        self._heard = time.monotonic()
        for report in reports:
            if isinstance(report, Stats):
                self.stats = report.values
            elif isinstance(report, Ready | LoadFailed):
                self._loaded(report)
            elif (stream := self._streams.get(report.job)) is not None:
                stream.push(report)
                if isinstance(report, Ended | Failed):
                    self._forget(report.job)
            elif isinstance(report, Output):
                discard(report.body)

    @abstractmethod
    def _loaded(self, report: Ready | LoadFailed) -> None:
        """The engine said whether its models are loaded."""

    def _forget(self, job: str) -> EventStream | None:
        # What the engine has not read of this job's large arrays, it never will.
        process_pool().release(job)
        return self._streams.pop(job, None)

    def _fail_jobs(self, error: PolymuxError) -> None:
        for job in list(self._streams):
            stream = self._forget(job)
            if stream is not None:
                stream.fail(error)

    def _not_ready(self) -> NotReady:
        if self.state == "loading":
            return NotReady(f"engine {self.name} is still loading its models; retry in a moment", retry_after=2.0)
        if self.state == "restarting":
            return NotReady(f"engine {self.name} died and is being restarted; retry in a moment", retry_after=2.0)
        reason = f": {self.failure.message}" if self.failure else ""
        return NotReady(f"engine {self.name} is stopped{reason}", retry_after=30.0)
