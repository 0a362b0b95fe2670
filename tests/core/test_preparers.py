"""Work that hangs costs its thread, nothing else."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading

import pytest

from polymux.core.preparers import Preparers


def nothing() -> None:
    pass


def test_what_waits_behind_stuck_work_gets_threads_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        preparers, go_on = Preparers(threads=2, stuck=0.1), threading.Event()
        hanging = [asyncio.create_task(preparers.run(go_on.wait, abandoned=nothing)) for _ in range(3)]
        await asyncio.sleep(0)  # all of them stand before it
        async with asyncio.timeout(5):
            assert await preparers.run(lambda: "served", abandoned=nothing) == "served"
        go_on.set()
        assert await asyncio.gather(*hanging) == [True] * 3
        async with asyncio.timeout(5):
            while sum(thread.name.startswith("preparers") for thread in threading.enumerate()) > 2:
                await asyncio.sleep(0.01)
        assert await preparers.run(lambda: "after", abandoned=nothing) == "after"
        preparers.close()

    with caplog.at_level(logging.ERROR, logger="polymux.service"):
        asyncio.run(go())
    assert len(caplog.records) == 2  # a thread each
    assert "has not come back" in caplog.text and "threading.py" in caplog.text


def test_a_process_ends_though_work_hangs() -> None:
    code = """
import asyncio, time
from polymux.core.preparers import Preparers

async def go():
    preparers = Preparers()
    hanging = asyncio.create_task(preparers.run(time.sleep, 600, abandoned=lambda: None))
    await asyncio.sleep(0.1)
    hanging.cancel()
    preparers.close()

asyncio.run(go())
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_exceptions_are_the_callers_and_close_drops_what_waits() -> None:
    async def go() -> None:
        preparers, begun, go_on = Preparers(threads=1), threading.Event(), threading.Event()
        with pytest.raises(ZeroDivisionError):
            await preparers.run(lambda: 1 / 0, abandoned=nothing)

        def work() -> str:
            begun.set()
            go_on.wait(5)
            return "ended"

        first = asyncio.create_task(preparers.run(work, abandoned=nothing))
        while not begun.is_set():
            await asyncio.sleep(0.005)
        second = asyncio.create_task(preparers.run(work, abandoned=nothing))
        await asyncio.sleep(0)
        preparers.close()
        go_on.set()
        assert await first == "ended"
        with pytest.raises(asyncio.CancelledError):
            await second
        with pytest.raises(RuntimeError, match="closed"):
            await preparers.run(work, abandoned=nothing)

    asyncio.run(go())
