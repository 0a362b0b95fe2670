"""The events of one job, between the engine's reader and whoever waits for them.

Pushing never waits, so a slow consumer holds nobody up; what it has not read is bounded: its tokens are merged,
and a backlog of anything else that grows past the limits ends the job.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from polymux.core.engine.wire import discard
from polymux.core.errors import Overloaded, PolymuxError
from polymux.core.vocabulary import Ended, Event, Failed, Output, Tokens

MERGE_AFTER = 64
"""Unread events from which on new tokens join those of their branch that still wait."""
MOST_EVENTS = 4096
MOST_BYTES = 64 << 20


class EventStream:
    """An async iterator over the events of one job, ending after `Ended` or `Failed`. For one consumer.

    Iterating raises `EngineDied` when the engine goes away and `Overloaded` when the consumer fell too far behind.
    """

    def __init__(self, job: str, leave: Callable[[str], None]) -> None:
        self.job = job
        self._leave = leave
        self._events: deque[Event] = deque()
        self._bytes = 0
        self._error: PolymuxError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._complete = False
        """The job is over: nothing will be pushed any more."""
        self._closed = False

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._complete or self._closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        event = self._events.popleft()
        if isinstance(event, Output):
            self._bytes -= len(memoryview(event.body))
        return event

    @property
    def waiting(self) -> int:
        """Events that arrived and were not read yet."""
        return len(self._events)

    def push(self, event: Event) -> None:
        """Called by the engine's reader for every event of the job, in order."""
        if self._closed or self._complete:
            if isinstance(event, Output):
                discard(event.body)
            return
        if isinstance(event, Tokens) and len(self._events) >= MERGE_AFTER and self._merge(event):
            return
        self._events.append(event)
        if isinstance(event, Output):
            self._bytes += len(memoryview(event.body))
        if isinstance(event, Ended | Failed):
            self._complete = True
        elif len(self._events) > MOST_EVENTS or self._bytes > MOST_BYTES:
            self._forget()
            self.fail(Overloaded("the answer was read too slowly and its backlog grew too large; read it faster"))
            self._leave(self.job)
        self._wake()

    def fail(self, error: PolymuxError) -> None:
        """Raise `error` in the consumer after the events that already arrived."""
        if not self._complete:
            self._complete = True
            self._error = error
            self._wake()

    def close(self) -> None:
        """Stop listening; the job is cancelled unless it is over. Closing twice is no error."""
        if self._closed:
            return
        self._closed = True
        self._forget()
        if not self._complete:
            self._leave(self.job)
        self._wake()

    def _merge(self, new: Tokens) -> bool:
        for event in reversed(self._events):
            if not isinstance(event, Tokens):
                return False
            if event.branch == new.branch:
                event.ids += new.ids
                if event.logprobs is not None and new.logprobs is not None:
                    event.logprobs += new.logprobs
                if event.top is not None and new.top is not None:
                    event.top += new.top
                return True
        return False

    def _forget(self) -> None:
        for event in self._events:
            if isinstance(event, Output):
                discard(event.body)
        self._events.clear()
        self._bytes = 0

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
