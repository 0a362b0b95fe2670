"""Mixed load: asks of any number of models in one loop, joining and leaving at any step, each answered as if alone.

mixture = Mixture([participant, another])
driver = mixture.run(site, [Visit("chat", 0), Visit("voice", 1, join=3, leave=9)])   # proves what must hold

A model joins by a `Participant`: how it is loaded, what it is asked, and how an answer is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from polymux.core.engine.lease import process_pool
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.engine.wire import discard
from polymux.core.pipeline import Program
from polymux.core.testing.drive import LIMIT, Driver
from polymux.core.vocabulary import Output


@dataclass(frozen=True)
class Ask:
    """What a front would send: the work, and what it posts after it."""

    task: str
    work: msgspec.Struct
    messages: Sequence[msgspec.Struct] = ()


@dataclass(frozen=True)
class Participant:
    """`read` is called once for each answered job: its answer as arrays."""

    model: str
    load: Callable[[Site], Program]
    asks: Sequence[Ask]
    read: Callable[[Driver, str], list[np.ndarray]]
    tolerance: float = 0.0
    """How far a number may be from the one alone; tokens and samples leave no room."""


@dataclass(frozen=True)
class Visit:
    """One ask of one model: submitted before step `join`, given up `leave` steps later unless it is over."""

    model: str
    ask: int
    join: int = 0
    leave: int | None = None
    priority: int = 0


@dataclass
class Mixture:
    participants: Sequence[Participant]
    _alone: dict[str, list[np.ndarray]] = field(default_factory=dict)
    _solo: Driver | None = None

    def run(self, site: Site, visits: Sequence[Visit]) -> Driver:
        """Raises `AssertionError` unless every visit that stayed got its answer, and nothing is left of any."""
        lent = process_pool().outstanding
        driver = self.open(site)
        self._drive(driver, visits)
        for number, visit in enumerate(visits):
            job = str(number)
            if driver.receipt(job) is not None:
                self._compare(driver, job, visit)
                continue
            assert visit.leave is not None, f"{visit} was not answered: {driver.error(job)}"
            assert driver.error(job) is None, f"{visit} was to leave and failed: {driver.error(job)}"
            release(driver, job)
        assert process_pool().outstanding == lent, "shared memory is still lent"
        return driver

    def open(self, site: Site) -> Driver:
        return Driver(Loop(site, {participant.model: participant.load(site) for participant in self.participants}))

    def _drive(self, driver: Driver, visits: Sequence[Visit]) -> None:
        last = max((visit.join + (visit.leave or 0) for visit in visits), default=0)
        for step in range(last + 1):
            for number, visit in enumerate(visits):
                if visit.join == step:
                    self._submit(driver, str(number), visit)
                if visit.leave is not None and visit.join + visit.leave == step:
                    driver.cancel(str(number))
            driver.step()
        driver.run(LIMIT)
        driver.loop.check_integrity()

    def _submit(self, driver: Driver, job: str, visit: Visit) -> None:
        ask = self._find(visit.model).asks[visit.ask]
        driver.submit(job, visit.model, ask.task, ask.work, priority=visit.priority)
        for message in ask.messages:
            driver.post(job, message)

    def _compare(self, driver: Driver, job: str, visit: Visit) -> None:
        participant = self._find(visit.model)
        expected = self.answer_alone(visit.model, visit.ask)
        found = participant.read(driver, job)
        assert len(found) == len(expected), f"{visit}: {len(found)} parts, alone {len(expected)}"
        for part, alone in zip(found, expected):
            np.testing.assert_allclose(part, alone, atol=participant.tolerance, rtol=0, err_msg=str(visit))

    def answer_alone(self, model: str, ask: int) -> list[np.ndarray]:
        """What the model says when nobody else is there and there is plenty of everything."""
        job = f"{model} {ask}"
        if job not in self._alone:
            self._solo = self._solo or self.open(Site(settings=SiteSettings(deterministic=True)))
            self._submit(self._solo, job, Visit(model, ask))
            self._solo.finish()
            assert self._solo.receipt(job) is not None, f"{job}: {self._solo.error(job)}"
            self._alone[job] = self._find(model).read(self._solo, job)
        return self._alone[job]

    def _find(self, model: str) -> Participant:
        return next(participant for participant in self.participants if participant.model == model)


def release(driver: Driver, job: str) -> None:
    """Do for a job that was given up what the client side does: take back what was lent, drop what was told."""
    process_pool().release(job)
    for report in driver.reports[job]:
        if isinstance(report, Output):
            discard(report.body)
