"""One asked question: prepared, submitted, and answered as its events arrive; cancelled when the caller leaves."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from polymux.core.arrival import arrives
from polymux.core.engine.lease import process_pool
from polymux.core.engine.stream import EventStream
from polymux.core.engine.wire import discard, pack
from polymux.core.errors import DeadlineExceeded, InternalError, PolymuxError
from polymux.core.pipeline import Front, Prepared, Presenter
from polymux.core.preparers import Preparers
from polymux.core.vocabulary import Ended, Failed, Output, Submit

if TYPE_CHECKING:
    from polymux.core.service import Served

log = logging.getLogger("polymux.service")

UNREAD = 8 << 20
"""Bytes of a lazily read upload that may wait for the engine; reading on pauses until it has taken some."""

AHEAD = 16
"""Events that may wait for a slow reader before its upload, or its text, is held back: the engine then pauses too."""

PAUSE = 0.01
"""Seconds between two looks at how much the engine has taken."""


class Answers:
    """An async context manager around an async iterator of a task's answers; made by `Service.open`.

    Entering prepares and submits; both it and iterating raise `PolymuxError`. The last answer is `Done`.
    """

    def __init__(
        self,
        served: Served,
        preparers: Preparers,
        job: str,
        task: str,
        ask: msgspec.Struct,
        priority: int,
        deadline: float | None,
    ) -> None:
        self.served = served
        self.job = job
        self.task = task
        self.ask = ask
        self.priority = priority
        self._preparers = preparers
        self._patient = arrives(ask)
        self._clock = asyncio.get_running_loop().time
        self._until = None if deadline is None else self._clock() + deadline
        self._presenter: Presenter | None = None
        self._stream: EventStream | None = None
        self._answers: deque[msgspec.Struct] = deque()
        self._over = False
        self._alarm: asyncio.TimerHandle | None = None
        self._poster: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Answers:
        with self.served.engine.expect():
            prepared, self._presenter, work = await self._prepare()
            left = None if self._until is None else self._until - self._clock()
            if left is not None and left <= 0:
                process_pool().release(self.job)
                raise self._too_late()
            if work is None:
                self._answers.extend(prepared.answers)
                self._over = True
                return self
            submit = Submit(self.job, self.served.model, self.task, work, self.priority, left)
            self._stream = self.served.engine.submit(submit)
        if self._until is not None:
            self._alarm = asyncio.get_running_loop().call_at(self._until, self._expire)
        if prepared.messages:
            self._poster = asyncio.create_task(self._post(iter(prepared.messages)), name=f"post {self.job}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if self._poster is not None:
            self._poster.cancel()
        if self._stream is not None:
            self._stream.close()

    def post(self, message: msgspec.Struct) -> None:
        """Put a message into the inbox of a running job. Nothing happens when the job is over."""
        if not self._over:
            self.served.engine.post(self.job, pack(message, holder=self.job))

    async def amend(self, ask: msgspec.Struct) -> None:
        """Prepare another ask of the same task and put its work into the running job's inbox. Raises `PolymuxError`."""
        body = await self._preparers.run(
            _prepare_again, self.served.front, self.task, ask, self.job, abandoned=self._abandon
        )
        if not self._over:
            self.served.engine.post(self.job, body)

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> msgspec.Struct:
        answers = self._answers
        while not answers:
            if self._over or self._stream is None or self._presenter is None:
                raise StopAsyncIteration
            try:
                event = await anext(self._stream)
            except PolymuxError:
                self._over = True
                raise
            if isinstance(event, Failed):
                self._over = True
                raise PolymuxError.from_wire(event.error)
            try:
                answers.extend(self._presenter.feed(event))
            except Exception as error:
                self._over = True
                self._stream.close()
                raise self._translate(error, "presenting") from error
            if isinstance(event, Output):
                discard(event.body)
            if isinstance(event, Ended):
                self._over = True
            else:
                for branch in self._presenter.take_unneeded():
                    self.served.engine.stop_branch(self.job, branch)
        return answers.popleft()

    async def _prepare(self) -> tuple[Prepared, Presenter | None, msgspec.Raw | None]:
        try:
            async with asyncio.timeout_at(self._until) as timeout:
                return await self._preparers.run(
                    _prepare,
                    self.served.front,
                    self.task,
                    self.ask,
                    self.job,
                    abandoned=self._abandon,
                    patient=self._patient,
                )
        except Exception as error:
            if timeout.expired():
                raise self._too_late() from error
            raise self._translate(error, "preparing") from error

    async def _post(self, messages: Iterator[msgspec.Struct]) -> None:
        try:
            while True:
                while process_pool().unread(self.job) > UNREAD or self._lag > AHEAD:
                    await asyncio.sleep(PAUSE)
                body = await self._preparers.run(
                    _pack_next, messages, self.job, abandoned=self._abandon, patient=self._patient
                )
                if body is None:
                    return
                self.served.engine.post(self.job, body)
        except Exception as error:
            self._fail(self._translate(error, "reading"))

    @property
    def _lag(self) -> int:
        """Events that the reader has not taken yet."""
        return 0 if self._stream is None else self._stream.waiting

    def _abandon(self) -> None:
        process_pool().release(self.job)

    def _expire(self) -> None:
        self._fail(self._too_late())

    def _fail(self, error: PolymuxError) -> None:
        if self._stream is not None:
            self._stream.fail(error)
            self.served.engine.cancel(self.job)

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the deadline of this {self.task} request has passed")

    def _translate(self, error: Exception, doing: str) -> PolymuxError:
        if isinstance(error, PolymuxError):
            return error
        log.error("%s job %s failed", doing, self.job, exc_info=error)
        return InternalError(f"{doing} this {self.task} request failed: {type(error).__name__}")


def _prepare(
    front: Front, task: str, ask: msgspec.Struct, job: str
) -> tuple[Prepared, Presenter | None, msgspec.Raw | None]:
    """Without a presenter and without work: the front has answered already."""
    prepared = front.prepare(task, ask)
    if prepared.work is None:
        return prepared, None, None
    return prepared, front.present(task, ask, prepared), pack(prepared.work, holder=job)


def _prepare_again(front: Front, task: str, ask: msgspec.Struct, job: str) -> msgspec.Raw:
    work = front.prepare(task, ask).work
    if work is None:
        raise InternalError(f"this {task} request cannot be amended")
    return pack(work, holder=job)


def _pack_next(messages: Iterator[msgspec.Struct], job: str) -> msgspec.Raw | None:
    message = next(messages, None)
    return None if message is None else pack(message, holder=job)
