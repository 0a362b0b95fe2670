"""An engine in a thread of this process, behind the same interface as one in a process of its own.

Everything still crosses as bytes, so what could not cross a process boundary fails here too.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polymux.core.engine.client import Engine
from polymux.core.engine.process import EngineLoop, drive
from polymux.core.engine.wire import decode_command, decode_reports, encode_command, encode_reports
from polymux.core.errors import EngineDied, ModelError, NotReady
from polymux.core.pipeline import Program
from polymux.core.vocabulary import Command, LoadFailed, Ready, Report, Stop

if TYPE_CHECKING:
    from polymux.core.engine.site import Site

LoopFactory = Callable[[Any, dict[str, Program]], EngineLoop]


class LocalEngine(Engine):
    """Runs a `Loop` over programs that are loaded already. Not restarted when the loop raises: tests want to see it."""

    def __init__(
        self,
        programs: Mapping[str, Program],
        site: Site | None = None,
        *,
        name: str = "local",
        make_loop: LoopFactory | None = None,
    ) -> None:
        """`make_loop(site, programs)` takes the place of `core.engine.loop.Loop`."""
        super().__init__(name)
        self.programs = dict(programs)
        self.site = site
        self.loop: EngineLoop | None = None
        """The loop itself, to look at once it is idle or stopped."""
        self._make_loop = make_loop or _make_loop
        self._answered = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"engine {name}", daemon=True)

    async def start(self) -> None:
        self._port = _QueuePort(asyncio.get_running_loop(), self._deliver)
        self._thread.start()

    async def wait_ready(self) -> None:
        await self._answered.wait()
        if self.state != "ready":
            raise self.failure or self._not_ready()

    async def stop(self) -> None:
        self.state = "stopped"
        self.send(Stop())
        await asyncio.to_thread(self._thread.join)
        self._fail_jobs(NotReady(f"engine {self.name} was stopped"))

    def send(self, command: Command) -> None:
        self._port.commands.put(encode_command(command))

    def _loaded(self, report: Ready | LoadFailed) -> None:
        if isinstance(report, Ready):
            self.models, self.plugins, self.state = report.models, report.plugins, "ready"
            self._answered.set()

    def _run(self) -> None:
        try:
            self.loop = self._make_loop(self.site, self.programs)
            self._port.send([Ready({name: program.describe() for name, program in self.programs.items()})])
            drive(self.loop, self._port)
        except Exception as error:
            self._port.events.call_soon_threadsafe(self._die, error)

    def _die(self, error: Exception) -> None:
        self.failure = ModelError(f"engine {self.name} died: {type(error).__name__}: {error}")
        self.failure.__cause__ = error
        self.state = "stopped"
        self._answered.set()
        self._fail_jobs(EngineDied(self.failure.message))


class _QueuePort:
    def __init__(self, events: asyncio.AbstractEventLoop, deliver: Callable[[Sequence[Report]], None]) -> None:
        self.events = events
        self.commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._deliver = deliver

    def receive(self, timeout: float) -> Sequence[Command]:
        commands: list[Command] = []
        try:
            if timeout > 0:
                commands.append(decode_command(self.commands.get(timeout=timeout)))
            while True:
                commands.append(decode_command(self.commands.get_nowait()))
        except queue.Empty:
            return commands

    def send(self, reports: Sequence[Report]) -> None:
        message = encode_reports(reports)
        self.events.call_soon_threadsafe(lambda: self._deliver(decode_reports(message)))


def _make_loop(site: Any, programs: dict[str, Program]) -> EngineLoop:
    from polymux.core.engine.loop import Loop

    return Loop(site, programs)
