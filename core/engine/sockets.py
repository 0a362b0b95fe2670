"""The two ends between a supervisor and its engine process: commands one way, reports the other, over zmq.

The supervisor binds both sockets in its private folder, at new addresses for every life of the engine: what was
meant for a dead one reaches nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence

import msgspec
import zmq

from polymux.core.engine.lease import process_pool
from polymux.core.engine.wire import decode_command, decode_reports, encode_command, encode_reports
from polymux.core.vocabulary import Command, Report

log = logging.getLogger("polymux.engine")

MOST_AT_ONCE = 32
"""Messages read before other callbacks of the event loop have their turn."""

_serial = itertools.count(1)


class ClientEnd:
    """Sends commands without waiting; hands every message of reports to `deliver`, on the event loop.

    `broken` is called when a message cannot be read or delivered; nothing is read after that.
    """

    def __init__(self, deliver: Callable[[Sequence[Report]], None], broken: Callable[[Exception], None]) -> None:
        folder, life = process_pool().folder.path, next(_serial)
        self.commands_address = f"ipc://{folder}/{life}.commands"
        self.reports_address = f"ipc://{folder}/{life}.reports"
        self._deliver, self._broken = deliver, broken
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PUSH)
        # Unbounded: a `Cancel` must never be lost, and the number of jobs is bounded elsewhere.
        self._commands.set_hwm(0)
        self._commands.bind(self.commands_address)
        self._reports = self._context.socket(zmq.PULL)
        self._reports.bind(self.reports_address)
        self._events = asyncio.get_running_loop()
        self._events.add_reader(self._reports.fileno(), self._read)

    def send(self, command: Command) -> None:
        """Nothing happens where the other end has just gone: its jobs fail as soon as that is known."""
        with contextlib.suppress(zmq.Again):
            self._commands.send(encode_command(command), zmq.NOBLOCK)

    def close(self) -> None:
        self._events.remove_reader(self._reports.fileno())
        self._reports.close(linger=0)
        self._commands.close(linger=0)
        self._context.term()

    def _read(self) -> None:
        # zmq tells once that messages have come, not how many: read until there are none, or come back at once.
        try:
            for _ in range(MOST_AT_ONCE):
                self._deliver(decode_reports(self._reports.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return
        except Exception as error:
            self._events.remove_reader(self._reports.fileno())
            self._broken(error)
            return
        self._events.call_soon(self._resume)

    def _resume(self) -> None:
        if not self._reports.closed:
            self._read()


class EngineEnd:
    """Takes commands as they come; a report waits while the gateway is a thousand messages behind."""

    def __init__(self, commands_address: str, reports_address: str) -> None:
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._commands.set_hwm(0)
        self._commands.connect(commands_address)
        self._reports = self._context.socket(zmq.PUSH)
        self._reports.connect(reports_address)

    def receive(self, timeout: float) -> Sequence[Command]:
        commands: list[Command] = []
        if timeout > 0 and not self._commands.poll(int(timeout * 1000) + 1):
            return commands
        while True:
            try:
                message = self._commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return commands
            try:
                commands.append(decode_command(message))
            except msgspec.DecodeError:
                log.exception("a command could not be read")

    def send(self, reports: Sequence[Report]) -> None:
        self._reports.send(encode_reports(reports))

    def close(self) -> None:
        self._context.destroy(linger=1000)
