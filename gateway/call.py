"""One job's way through the gateway: admitted, opened, measured, and left early when its client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
from starlette.types import Receive

from polymux.core.errors import NotReady, Overloaded, PolymuxError
from polymux.core.tasks import ChoiceEnded, Done
from polymux.gateway.errors import ClientLeft, wrap_unexpected
from polymux.gateway.receipts import Entry
from polymux.gateway.turn import Turn

if TYPE_CHECKING:
    from polymux.core.answers import Answers
    from polymux.gateway.state import Gateway


class Call:
    """Iterate over the answers inside `async with call.answers()`."""

    def __init__(
        self, gateway: Gateway, model: str, task: str, ask: msgspec.Struct, *, weight: int, request_id: str
    ) -> None:
        self.gateway = gateway
        self.model = model
        self.task = task
        self.ask = ask
        self.weight = weight
        self.request_id = request_id
        self.meters = gateway.metrics.of(model, task)
        self.opened: Answers | None = None
        """What can be posted to, while the job runs."""
        self.done: Done | None = None
        self.outcome = "running"
        """For the log: finished, rejected, left, or the code of the failure."""
        self._begin = time.perf_counter()

    @asynccontextmanager
    async def answers(self) -> AsyncIterator[AsyncIterator[msgspec.Struct]]:
        """Raises `PolymuxError`, whatever went wrong: our own faults come out as `InternalError`."""
        meters = self.meters
        try:
            async with self.gateway.gates.of(self.model).admit(self.weight):
                meters.queue_time.observe(time.perf_counter() - self._begin)
                self.ask = await self.gateway.fetcher.resolve(self.ask)
                async with self.gateway.service.open(
                    self.model, self.task, self.ask, request_id=self.request_id
                ) as answers:
                    self.opened = answers
                    yield self._measure(answers)
            self.outcome = "finished"
        except Overloaded:
            self.outcome = "rejected"
            meters.rejected.inc()
            raise
        except PolymuxError as error:
            self._count_failure(error)
            raise
        except (asyncio.CancelledError, ClientLeft):
            self.outcome = "left"
            meters.aborted.inc()
            raise
        except Exception as error:
            wrapped = wrap_unexpected(error)
            self._count_failure(wrapped)
            raise wrapped from error

    def _count_failure(self, error: PolymuxError) -> None:
        self.outcome = error.code or error.type
        self.meters.count_failure(self.outcome)

    async def _measure(self, answers: AsyncIterator[msgspec.Struct]) -> AsyncIterator[msgspec.Struct]:
        meters = self.meters
        last = 0.0
        turn = Turn()
        async for answer in answers:
            now = time.perf_counter()
            if last:
                meters.token_gap.observe(now - last)
            else:
                meters.first_token.observe(now - self._begin)
            last = now
            if isinstance(answer, ChoiceEnded):
                meters.count_success(answer.reason)
            elif isinstance(answer, Done):
                self.done = answer
                self.gateway.receipts.keep(self.request_id, Entry(self.model, self.task, answer.receipt))
                meters.record_usage(answer.usage)
                meters.record_pace(now - self._begin, answer.usage.seconds)
                meters.whole.observe(now - self._begin)
            await turn.pass_on()
            yield answer


@asynccontextmanager
async def watch_client(gateway: Gateway, receive: Receive) -> AsyncIterator[None]:
    """Cancels the body as soon as the client is gone, streaming or not, and raises `ClientLeft` from it.

    A cancellation by the stopping server becomes `NotReady`, so that the client is told.

    The request's body must have been read. The last send belongs after this block: it makes `receive` report a
    disconnect as well.
    """
    task = asyncio.current_task()
    assert task is not None
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise ClientLeft from None
        if gateway.draining:
            task.uncancel()
            raise NotReady("the server is stopping", retry_after=1) from None
        raise
    finally:
        watcher.cancel()
