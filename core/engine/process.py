"""The engine process: load the models, then take commands, step, report, until told to stop or the parent dies.

It owns the device, so nothing else happens here: text, media and HTTP are other processes' work.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

import msgspec
from setproctitle import setproctitle

from polymux.core.engine.lease import close_process_pool
from polymux.core.engine.sockets import EngineEnd
from polymux.core.engine.spec import EngineSpec
from polymux.core.errors import ModelError, PolymuxError
from polymux.core.logs import open_log
from polymux.core.stopwatch import begin
from polymux.core.vocabulary import Command, LoadFailed, Ready, Report, Stats, Stop

LOAD_FAILED = 3
"""The exit status that says: the last report tells why the models did not load."""

STATS_SECONDS = 1.0

YOUNG, MIDDLE, OLD = 5_000, 20, 100
"""The collector's thresholds. Jobs and their rows refer to each other, so it must run, but Python's own 700 objects
are a few steps' worth."""

_PR_SET_PDEATHSIG = 1

log = logging.getLogger("polymux.engine")


class EngineLoop(Protocol):
    """What the process drives: `core.engine.loop.Loop`."""

    def handle(self, command: Command) -> None: ...
    def step(self) -> bool: ...
    def take_reports(self) -> list[Report]: ...
    def stats(self) -> dict[str, float]: ...
    def close(self) -> None: ...


class Port(Protocol):
    """The engine's end of a connection."""

    def receive(self, timeout: float) -> Sequence[Command]:
        """Every command that has arrived; waits up to `timeout` seconds for the first."""

    def send(self, reports: Sequence[Report]) -> None: ...


Load = Callable[[EngineSpec], tuple[EngineLoop, Ready]]
"""Loads what a spec names; returns the loop and what is told of it. `core.engine.load` has the real one."""


def drive(loop: EngineLoop, port: Port) -> None:
    """Run the loop until `Stop`: one message of reports a step, waiting only when there is nothing to do."""
    busy, due = False, 0.0
    while True:
        for command in port.receive(0.0 if busy else max(0.0, due - time.monotonic())):
            if type(command) is Stop:
                loop.close()
                return
            loop.handle(command)
        was_busy, busy = busy, loop.step()
        reports = loop.take_reports()
        now = time.monotonic()
        # An engine that has come to rest says so at once: its gauges are not to show work that is over.
        if now >= due or (was_busy and not busy):
            due = now + STATS_SECONDS
            reports.append(Stats(loop.stats()))
        if reports:
            port.send(reports)


def main(load: Load, prepare: Callable[[], None] = lambda: None) -> NoReturn:
    """The whole life of an engine process. Exit status 0: told to stop.

    `prepare` runs on a thread of its own while the spec is awaited, and has ended when `load` begins.
    """
    begin()
    open_log()
    # A terminal's Ctrl-C and a service manager's SIGTERM reach the whole group. The gateway drains first, and the
    # answers it waits for come from here: an engine ends by `Stop`, or with its standard input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_parent()
    preparing = threading.Thread(target=prepare, name="prepare", daemon=True)
    preparing.start()
    line = sys.stdin.buffer.readline()
    if not line:  # nobody needs it any more
        leave(0)
    spec = msgspec.json.decode(line, type=EngineSpec)
    setproctitle(f"polymux engine {spec.name}")
    threading.Thread(target=_watch_parent, name="parent", daemon=True).start()
    preparing.join()
    try:
        status = run(spec, load)
    except Exception:
        log.exception("engine %s failed", spec.name)
        status = 1
    leave(status)


def run(spec: EngineSpec, load: Load) -> int:
    """Load and serve; returns the exit status. Raises what the loop raises: the process is then to be replaced."""
    port = EngineEnd(spec.commands, spec.reports)
    try:
        try:
            loop, ready = load(spec)
        except Exception as error:
            port.send([LoadFailed(_explain(error).to_wire())])
            return LOAD_FAILED
        _settle()
        port.send([ready])
        drive(loop, port)
    finally:
        port.close()
    return 0


def leave(status: int) -> NoReturn:
    """End this process without tearing down the interpreter.

    With torch inside that takes seconds, and the kernel takes everything back at once.
    """
    close_process_pool()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _settle() -> None:
    """What is loaded stays: the collector need not walk it again, in the middle of somebody's step."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)


def _explain(error: Exception) -> PolymuxError:
    if isinstance(error, PolymuxError):
        return error
    log.error("loading failed", exc_info=error)
    return ModelError(f"loading failed: {type(error).__name__}: {error}")


def _die_with_parent() -> None:
    # The kernel's own promise holds even while this process hangs inside a device call.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch_parent() -> None:
    # Standard input stays open for as long as the parent wants this process: its end is the portable sign of the
    # parent's death, and how a parent stops an engine that loads and reads no commands yet.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)
