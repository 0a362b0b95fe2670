"""The threads that turn asks into work: a bounded crew behind a bounded queue, beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from polymux.core.arrival import MOST_ARRIVING
from polymux.core.errors import Overloaded

log = logging.getLogger("polymux.service")

T = TypeVar("T")

STUCK = 30.0
"""Seconds after which work is taken for stuck."""
MOST_STUCK = 64
"""Threads that get a successor; what hangs beyond them holds up the rest."""


class Preparers:
    """Runs CPU work for the event loop; callers see a coroutine, so that processes can take the threads' place."""

    def __init__(self, threads: int = 2, most_waiting: int = 256, stuck: float = STUCK) -> None:
        self._crew = _Crew("preparers", threads, stuck)
        self._patient = _Crew("patient-preparers", MOST_ARRIVING, float("inf"))
        self._places = threading.BoundedSemaphore(threads + most_waiting)
        self._stuck = stuck
        self._watched = False

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
        future: Future[T] = Future()
        future.add_done_callback(lambda _: self._places.release())
        (self._patient if patient else self._crew).submit(future, partial(work, *arguments))
        if not self._watched:
            self._watch(asyncio.get_running_loop())
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda _: abandoned())
            raise

    def close(self) -> None:
        """Drop what waits; what runs ends on its own."""
        self._crew.close()
        self._patient.close()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look after the crew now and then, as long as it works."""
        self._watched = self._crew.replace_stuck()
        if self._watched:
            loop.call_later(self._stuck / 2, self._watch, loop)


class _Crew:
    """Threads over one queue, started when they are needed.

    One that is stuck gets a successor, so that it keeps no other work waiting; and it does not keep the process from
    ending, as a thread of `concurrent.futures` would.
    """

    def __init__(self, name: str, threads: int, stuck: float) -> None:
        self._name = name
        self._threads = threads
        self._patience = stuck
        self._lock = threading.Lock()
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._began: dict[int, float] = {}
        """By the identity of a thread: since when it works on what it has."""
        self._stuck: set[int] = set()
        self._size = 0
        self._owed = 0
        """What was handed in and has not ended."""
        self._closed = False

    def submit(self, future: Future[T], work: Callable[[], T]) -> None:
        with self._lock:
            if self._closed:
                future.cancel()
                raise RuntimeError("the preparers are closed")
            self._owed += 1
            self._queue.put((future, work))
            self._grow()

    def replace_stuck(self) -> bool:
        """Let a successor take the place of each thread that is stuck. False when there is nothing to look after."""
        with self._lock:
            now = time.monotonic()
            late = {thread for thread, began in self._began.items() if now - began > self._patience}
            for thread in sorted(late - self._stuck):
                log.error("work has not come back for %.0f s; it is at %s", self._patience, _locate(thread))
            self._stuck = late
            self._grow()
            return not self._closed and self._owed > 0

    def close(self) -> None:
        with self._lock:
            self._closed = True
            while True:
                try:
                    item = self._queue.get_nowait()
                except Empty:
                    break
                if item is not None:
                    item[0].cancel()
            for _ in range(self._size):
                self._queue.put(None)

    def _grow(self) -> None:
        most = self._threads + min(len(self._stuck), MOST_STUCK)
        while not self._closed and self._size < min(most, self._owed):
            self._size += 1
            threading.Thread(target=self._serve, name=f"{self._name}-{self._size}", daemon=True).start()

    def _serve(self) -> None:
        while item := self._queue.get():
            self._work(*item)
            del item  # nothing of a request stays while the thread waits
            with self._lock:
                self._owed -= 1
                if self._size > self._threads + len(self._stuck):  # it was stuck, and has a successor
                    self._size -= 1
                    return

    def _work(self, future: Future[Any], work: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        thread = threading.get_ident()
        with self._lock:
            self._began[thread] = time.monotonic()
        try:
            value = work()
        except BaseException as error:  # it is the caller's
            future.set_exception(error)
        else:
            future.set_result(value)
        with self._lock:
            del self._began[thread]
            self._stuck.discard(thread)


def _locate(thread: int) -> str:
    """The file and line that a thread is at."""
    frame = sys._current_frames().get(thread)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, {frame.f_code.co_name}" if frame else "its end"
