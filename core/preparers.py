"""The threads that turn asks into work: a bounded pool behind a bounded queue, beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from polymux.core.arrival import MOST_ARRIVING
from polymux.core.errors import Overloaded

T = TypeVar("T")


class Preparers:
    """Runs CPU work for the event loop; callers see a coroutine, so that processes can take the threads' place."""

    def __init__(self, threads: int = 2, most_waiting: int = 256) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="preparers")
        self._patient = ThreadPoolExecutor(MOST_ARRIVING, thread_name_prefix="patient-preparers")
        self._places = threading.BoundedSemaphore(threads + most_waiting)

    async def run(
        self, work: Callable[..., T], *arguments: Any, abandoned: Callable[[], None], patient: bool = False
    ) -> T:
        """`work(*arguments)`, on a thread. Raises `Overloaded` at once when too much waits already.

        `patient` work may wait for bytes that a client still sends: it keeps no other work from a thread.
        A thread cannot be interrupted: when the caller is cancelled, `abandoned` is called after the work has
        ended (on whichever thread), to undo what it did.
        """
        if not self._places.acquire(blocking=False):
            raise Overloaded("too many requests wait to be prepared; retry later")
        try:
            pool = self._patient if patient else self._pool
            future: Future[T] = pool.submit(work, *arguments)
        except BaseException:
            self._places.release()
            raise
        future.add_done_callback(lambda _: self._places.release())
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda _: abandoned())
            raise

    def close(self) -> None:
        """Drop what waits; what runs ends on its own."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._patient.shutdown(wait=False, cancel_futures=True)
