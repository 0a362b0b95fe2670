"""A process that is begun before its work is known goes with whoever began it."""

from __future__ import annotations

import asyncio
import sys

import psutil
import pytest

from polymux.core.engine.child import Child

WAITING = (sys.executable, "-c", "import sys; line = sys.stdin.readline(); sys.exit(len(line))")


def test_it_is_told_and_ends() -> None:
    async def go() -> None:
        child = Child(WAITING)
        child.tell(b"1234")
        assert await asyncio.gather(child.wait(), child.wait()) == [5, 5]
        child.tell(b"too late")
        child.dismiss()
        child.kill()

    asyncio.run(go())


def test_who_stops_waiting_stops_nobody_else() -> None:
    async def go() -> None:
        child = Child(WAITING)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(child.wait(), 0.01)
        child.dismiss()
        assert await child.wait() == 0

    asyncio.run(go())


def test_nothing_is_left_behind_a_failure() -> None:
    with pytest.raises(KeyError), Child(WAITING) as child:
        raise KeyError
    assert not psutil.pid_exists(child.pid)


def test_an_engine_that_is_not_needed_ends_before_it_knows_of_anything() -> None:
    async def go() -> None:
        child = Child((sys.executable, "-m", "polymux.core.engine"))
        child.dismiss()
        assert await child.wait() == 0

    asyncio.run(go())
