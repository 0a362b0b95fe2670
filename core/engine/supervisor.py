"""An engine in a process of its own, restarted when it dies.

loading -> ready -> restarting -> ready ..., and stopped: told to, unable to load, or dead too often too quickly.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from polymux.core.engine.child import COMMAND, Child
from polymux.core.engine.client import Engine
from polymux.core.engine.folder import sweep
from polymux.core.engine.process import LOAD_FAILED
from polymux.core.engine.sockets import ClientEnd
from polymux.core.engine.spec import EngineSpec
from polymux.core.errors import EngineDied, ModelError, NotReady
from polymux.core.stopwatch import begun
from polymux.core.vocabulary import Command, LoadFailed, Ready, Stop

log = logging.getLogger("polymux.supervisor")


@dataclass(frozen=True)
class Restarts:
    """When a dead engine is started again. Times are seconds."""

    first: float = 0.2
    longest: float = 30.0
    """The pause doubles from `first` to `longest` with every quick death in a row."""
    quick: float = 60.0
    """Dead sooner than this after it was ready: a quick death."""
    most: int = 5
    """So many quick deaths in a row, and the engine stays stopped."""

    def pause(self, deaths: int) -> float:
        return min(self.longest, self.first * 2.0 ** (deaths - 1))


class EngineProcess(Engine):
    """Starts `python -m polymux.core.engine` with `spec` and keeps it alive.

    A process that dies before it was ever ready is not tried again: whoever starts a server reads why at once.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        restarts: Restarts | None = None,
        command: Sequence[str] = COMMAND,
        grace: float = 5.0,
        first: Child | None = None,
    ) -> None:
        """`first` is a process of `command` that was begun already, with the one that calls this."""
        super().__init__(spec.name)
        self.spec = spec
        self.restarts = restarts or Restarts()
        self.command = tuple(command)
        self.grace = grace
        """Seconds that `stop` waits before it kills."""
        self.deaths = 0
        """How often the process died without being told to."""
        self._first = first
        self._process: Child | None = None
        self._end: ClientEnd | None = None
        self._ready_at: float | None = None
        self._answered = asyncio.Event()
        self._settled = asyncio.Event()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process of this life, or None between two."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._supervise(), name=f"supervise {self.name}")

    async def wait_ready(self) -> None:
        await self._settled.wait()
        if self.state != "ready":
            raise self.failure or self._not_ready()

    async def stop(self) -> None:
        self._stopping = True
        if self._process is not None:
            await self._end_process(self._process)
        elif self._task is not None:
            self._task.cancel()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self._turn("stopped")
        self._fail_jobs(NotReady(f"engine {self.name} was stopped"))

    def send(self, command: Command) -> None:
        # Between two lives there is nobody to tell: all jobs have failed, or are about to.
        if self._end is not None:
            self._end.send(command)

    def _loaded(self, report: Ready | LoadFailed) -> None:
        if isinstance(report, Ready):
            self.models, self.plugins = report.models, report.plugins
            self._ready_at = time.monotonic()
            self._turn("ready")
        else:
            self.failure = ModelError(report.error["message"], code=report.error["code"])
        self._answered.set()

    def _turn(self, state: str) -> None:
        self.state = state
        if state in ("ready", "stopped"):
            self._settled.set()
        else:
            self._settled.clear()

    async def _supervise(self) -> None:
        quick, ever_ready = 0, False
        while True:
            reason = await self._live()
            if self._stopping:
                return
            self.deaths += 1
            ever_ready = ever_ready or self._ready_at is not None
            lived = time.monotonic() - self._ready_at if self._ready_at is not None else 0.0
            quick = quick + 1 if lived < self.restarts.quick else 1
            again = ever_ready and quick <= self.restarts.most
            if not again and self.failure is None:
                when = f"{quick} times in a row" if ever_ready else "while it loaded its models"
                self.failure = ModelError(f"engine {self.name} {reason} {when}")
            self._turn("restarting" if again else "stopped")
            self._fail_jobs(EngineDied(f"engine {self.name} {reason}; the request can be sent again"))
            await asyncio.to_thread(sweep)
            if not again:
                log.error("engine %s is stopped: %s", self.name, self.failure)
                return
            pause = self.restarts.pause(quick)
            log.warning("engine %s %s; starting it again in %.1f s", self.name, reason, pause)
            await asyncio.sleep(pause)

    async def _live(self) -> str:
        """One life of the process, from its start to its death; returns how it ended."""
        self.failure, self._ready_at = None, None
        self._answered.clear()
        end = ClientEnd(self._deliver, self._lose)
        process, self._first = self._first, None
        try:
            began = begun() if process is not None else None
            process = process or Child(self.command)
            spec = msgspec.structs.replace(
                self.spec,
                commands=end.commands_address,
                reports=end.reports_address,
                began=process.began if began is None else began,
            )
            process.tell(msgspec.json.encode(spec))
            self._process, self._end = process, end
            status = await process.wait()
            if status == LOAD_FAILED:
                # The news of its death is faster than its last message.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._answered.wait(), 1.0)
            return _describe(status)
        except OSError as error:
            return f"cannot be started ({error})"
        finally:
            self._process, self._end = None, None
            if process is not None:
                process.kill()
                await process.wait()
            end.close()

    def _lose(self, error: Exception) -> None:
        log.error("engine %s sent what cannot be read; it is killed", self.name, exc_info=error)
        if self._process is not None:
            self._process.kill()

    async def _end_process(self, process: Child) -> None:
        if self.state == "ready":
            self.send(Stop())
        else:
            process.dismiss()  # it reads no commands while it loads
        try:
            await asyncio.wait_for(process.wait(), self.grace)
        except TimeoutError:
            process.kill()


def _describe(status: int) -> str:
    if status == LOAD_FAILED:
        return "could not load its models"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"
