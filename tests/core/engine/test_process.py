"""The engine process by itself: it lives as long as its parent wants it, whatever signals come, and leaves no trace."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np
import psutil
import pytest

from polymux.core.engine.folder import shared_memory
from polymux.core.engine.process import drive
from polymux.core.engine.spec import EngineSpec
from polymux.core.engine.supervisor import EngineProcess
from polymux.core.engine.wire import INLINE_BYTES, pack
from polymux.core.testing.counting import COMMAND, Count, CountingLoop, Echo
from polymux.core.vocabulary import Command, Ended, Output, Report, Stats, Stop, Submit, Tokens

PARENT = """
import asyncio, sys
from polymux.core.engine.spec import EngineSpec
from polymux.core.engine.supervisor import EngineProcess
from polymux.core.testing.counting import COMMAND

async def go():
    engine = EngineProcess(EngineSpec(name="orphan", settings={"slow": float(sys.argv[1])}), command=COMMAND)
    await engine.start()
    while engine.pid is None or (engine.state == "loading" and sys.argv[1] == "0"):
        await asyncio.sleep(0.01)
    print(engine.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(go())
"""


def wait_until_gone(process: psutil.Process, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{process} is still alive"
        time.sleep(0.01)


@pytest.mark.parametrize("slow", ["0", "30"], ids=["ready", "loading"])
def test_the_engine_dies_when_its_parent_is_killed(slow: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, slow], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    engine = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until_gone(engine)


def test_signals_to_the_group_leave_the_engine_to_its_gateway() -> None:
    """Ctrl-C and a service manager's SIGTERM reach it too, but the answers that a gateway drains come from it."""

    async def go() -> int:
        engine = EngineProcess(EngineSpec(name="patient"), command=COMMAND)
        await engine.start()
        await engine.wait_ready()
        pid = engine.pid or 0
        stream = engine.submit(Submit("j", "counter", "count", pack(Count(10**9, pause=0.001))))
        await anext(stream)
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        while (await anext(stream)).ids[-1] < 100:  # type: ignore[union-attr]
            pass
        large = engine.submit(Submit("large", "counter", "echo", pack(Echo(np.zeros(INLINE_BYTES)))))
        assert [type(event) async for event in large] == [Output, Ended]
        assert list(shared_memory().glob(f"polymux-{pid}-*"))
        await engine.stop()
        return pid

    pid = asyncio.run(go())
    assert not list(shared_memory().glob(f"polymux-{pid}-*")), "stopped, it leaves no shared memory"


class Script:
    """A port that plays commands, one list a call, and keeps what was reported, stats apart."""

    def __init__(self, *commands: list[Command]) -> None:
        self.commands = list(commands)
        self.timeouts: list[float] = []
        self.messages: list[list[Report]] = []
        self.stats: list[dict[str, float]] = []

    def receive(self, timeout: float) -> Sequence[Command]:
        self.timeouts.append(timeout)
        return self.commands.pop(0)

    def send(self, reports: Sequence[Report]) -> None:
        self.stats += [report.values for report in reports if isinstance(report, Stats)]
        self.messages.append([report for report in reports if not isinstance(report, Stats)])


def test_one_message_a_step_and_no_waiting_while_busy() -> None:
    submits: list[Command] = [Submit(job, "counter", "count", pack(Count(2))) for job in ("a", "b")]
    port = Script(submits, [], [], [], [Stop()])
    loop = CountingLoop()
    drive(loop, port)
    assert loop.closed
    assert port.messages[:3] == [
        [Tokens("a", 0, [0]), Tokens("b", 0, [0])],
        [Tokens("a", 0, [1]), Tokens("b", 0, [1])],
        port.messages[2],
    ]
    assert [type(report) for report in port.messages[2]] == [Ended, Ended]
    assert port.timeouts[1:3] == [0.0, 0.0]
    assert port.timeouts[4] > 0.0


def test_an_engine_that_comes_to_rest_says_so_at_once() -> None:
    port = Script([Submit("a", "counter", "count", pack(Count(2)))], [], [], [Stop()])
    drive(CountingLoop(), port)
    assert [stats["running"] for stats in port.stats] == [1.0, 0.0]
