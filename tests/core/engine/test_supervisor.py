"""An engine process dies as processes do; its callers hear of it at once and the next one takes its place."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import psutil
import pytest

from polymux.core.engine.lease import process_pool
from polymux.core.engine.spec import EngineSpec
from polymux.core.engine.stream import EventStream
from polymux.core.engine.supervisor import EngineProcess, Restarts
from polymux.core.engine.wire import INLINE_BYTES, pack, unpack
from polymux.core.errors import EngineDied, ModelError, NotReady, Overloaded
from polymux.core.testing.counting import COMMAND, Count, Echo
from polymux.core.vocabulary import Ended, Failed, Output, Submit, Tokens

FOREVER = 10**9


@asynccontextmanager
async def engine(restarts: Restarts | None = None, **settings: Any) -> AsyncIterator[EngineProcess]:
    spec = EngineSpec(name="counter", settings=settings)
    engine = EngineProcess(spec, command=COMMAND, restarts=restarts or Restarts(first=0.05))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        assert engine.pid is None


def count(engine: EngineProcess, job: str, n: int, **more: Any) -> EventStream:
    return engine.submit(Submit(job, "counter", "count", pack(Count(n, **more), holder=job)))


async def is_refused(engine: EngineProcess, words: str) -> None:
    with pytest.raises(NotReady, match=words) as caught:
        count(engine, "refused", 1)
    assert caught.value.status == 503
    assert caught.value.retry_after


def test_jobs_run_side_by_side_and_end() -> None:
    async def go() -> None:
        async with engine() as counter:
            await is_refused(counter, "loading")
            await counter.wait_ready()
            assert counter.models == {"counter": {"dtype": "int"}}
            assert psutil.Process(counter.pid).cmdline()[0].startswith("polymux engine counter")
            streams = [count(counter, f"j{i}", 20) for i in range(10)]
            for stream in streams:
                events = [event async for event in stream]
                assert [event.ids for event in events[:-1]] == [[i] for i in range(20)]
                assert isinstance(events[-1], Ended)
            failing = [event async for event in count(counter, "failing", 1, fail=True)]
            assert isinstance(failing[-1], Failed)
            assert failing[-1].error["status"] == 400
            assert counter.jobs == 0
        await is_refused(counter, "stopped")

    asyncio.run(go())


def test_waiting_threads_sleep_unless_the_user_wants_them_to_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spinning OpenMP threads make a busy machine of few cores several times slower."""

    code = "import os, sys; sys.stdin.readline(); sys.exit(os.environ['OMP_WAIT_POLICY'] != sys.argv[1])"

    async def go(policy: str) -> None:
        counter = EngineProcess(EngineSpec(name="counter"), command=(sys.executable, "-c", code, policy))
        await counter.start()
        with pytest.raises(ModelError, match="exited with status 0"):
            await counter.wait_ready()
        await counter.stop()

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    asyncio.run(go("PASSIVE"))
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    asyncio.run(go("ACTIVE"))


def test_large_arrays_cross_as_leases_in_both_directions() -> None:
    array = np.random.default_rng(0).random((300, 1000))

    async def go() -> None:
        async with engine() as counter:
            await counter.wait_ready()
            stream = counter.submit(Submit("j", "counter", "echo", pack(Echo(array), holder="j")))
            output, ended = [event async for event in stream]
            assert isinstance(output, Output)
            np.testing.assert_array_equal(unpack(output.body, Echo).array, array)
            assert isinstance(ended, Ended)
            assert process_pool().outstanding == 0

    asyncio.run(go())


def test_killing_the_engine_fails_its_jobs_at_once_and_it_comes_back() -> None:
    async def go() -> None:
        async with engine() as counter:
            await counter.wait_ready()
            other = count(counter, "other", FOREVER)
            unread = Submit("unread", "counter", "echo", pack(Echo(np.zeros(INLINE_BYTES)), holder="unread"))
            stream = count(counter, "j", FOREVER)
            assert await anext(stream) == Tokens("j", 0, [0])
            os.kill(counter.pid or 0, signal.SIGSTOP)
            counter.submit(unread)
            killed = time.monotonic()
            os.kill(counter.pid or 0, signal.SIGKILL)
            for each in (stream, other):
                with pytest.raises(EngineDied, match="SIGKILL"):
                    async for _ in each:
                        pass
            assert time.monotonic() - killed < 1.0
            assert (counter.state, counter.jobs, counter.deaths) == ("restarting", 0, 1)
            assert process_pool().outstanding == 0
            await is_refused(counter, "restarted")
            await counter.wait_ready()
            assert len([event async for event in count(counter, "again", 3)]) == 4

    asyncio.run(go())


def test_a_job_for_an_engine_that_has_just_died_fails_as_its_others_do() -> None:
    """Before its death is known, when nobody is there to read the command."""

    async def go() -> None:
        async with engine() as counter:
            await counter.wait_ready()
            os.kill(counter.pid or 0, signal.SIGKILL)
            time.sleep(0.3)  # the sockets may learn of it, the event loop not
            assert counter.state == "ready"
            with pytest.raises(EngineDied, match="SIGKILL"):
                async for _ in count(counter, "late", 1):
                    pass

    asyncio.run(go())


def test_a_job_that_kills_every_engine_trips_the_breaker() -> None:
    async def go() -> None:
        async with engine(Restarts(first=0.01, most=2)) as counter:
            for _ in range(3):
                await counter.wait_ready()
                with pytest.raises(EngineDied):
                    async for _ in count(counter, "poison", 1, die=True):
                        pass
            with pytest.raises(ModelError, match="SIGKILL 3 times in a row"):
                await counter.wait_ready()
            assert counter.deaths == 3
            await is_refused(counter, "stopped: engine counter was killed")

    asyncio.run(go())


def test_the_pause_doubles_up_to_the_longest() -> None:
    restarts = Restarts(first=0.5, longest=3.0)
    assert [restarts.pause(deaths) for deaths in (1, 2, 3, 4, 40)] == [0.5, 1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"broken": True}, "model counter: weights.safetensors is missing"),
        ({"bug": True}, "loading failed: KeyError: 'layer.0'"),
        ({"fatal": True}, "was killed by SIGKILL while it loaded its models"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_models_that_do_not_load_stop_the_engine_with_the_reason(settings: dict[str, Any], words: str) -> None:
    async def go() -> None:
        async with engine(**settings) as counter:
            with pytest.raises(ModelError, match=words):
                await counter.wait_ready()
            assert counter.state == "stopped"
            assert words in counter.describe()["failure"]
            await is_refused(counter, words)

    asyncio.run(go())


def test_what_an_engine_logs_says_how_grave_it_is_and_who_says_it(capfd: pytest.CaptureFixture[str]) -> None:
    async def go() -> None:
        async with engine(bug=True) as counter:
            with pytest.raises(ModelError):
                await counter.wait_ready()

    asyncio.run(go())
    assert "ERROR polymux.engine: loading failed" in capfd.readouterr().err


def test_a_program_that_cannot_be_started_says_so() -> None:
    async def go() -> None:
        counter = EngineProcess(EngineSpec(name="counter"), command=("/nowhere/python",))
        await counter.start()
        with pytest.raises(ModelError, match="cannot be started"):
            await counter.wait_ready()
        await counter.stop()

    asyncio.run(go())


def test_stopping_while_it_loads_does_not_wait_for_the_load() -> None:
    async def go() -> None:
        async with engine(slow=60) as counter:
            while counter.pid is None:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            began = time.monotonic()
        assert time.monotonic() - began < 3.0

    asyncio.run(go())


def test_stopping_ends_running_jobs() -> None:
    async def go() -> None:
        async with engine() as counter:
            await counter.wait_ready()
            stream = count(counter, "j", FOREVER)
            await anext(stream)
            await counter.stop()
            with pytest.raises(NotReady, match="stopped"):
                async for _ in stream:
                    pass

    asyncio.run(go())


def test_a_cancelled_job_stops_within_a_step_and_others_go_on() -> None:
    async def go() -> None:
        async with engine() as counter:
            await counter.wait_ready()
            left, stays = count(counter, "left", FOREVER, pause=0.001), count(counter, "stays", FOREVER, pause=0.001)
            await anext(left)
            left.close()
            assert counter.jobs == 1
            while counter.stats.get("running") != 1.0:
                await anext(stays)
            stays.close()

    asyncio.run(go())


def test_a_consumer_that_never_reads_holds_nobody_up() -> None:
    async def go() -> None:
        async with engine() as counter:
            await counter.wait_ready()
            lazy = count(counter, "lazy", 5000)
            brisk = [event async for event in count(counter, "brisk", 5000)]
            assert sum(len(event.ids) for event in brisk if isinstance(event, Tokens)) == 5000
            late = [event async for event in lazy]
            assert len(late) < 200
            assert [token for event in late if isinstance(event, Tokens) for token in event.ids] == list(range(5000))

    asyncio.run(go())


def test_too_many_jobs_are_refused_before_they_are_sent() -> None:
    async def go() -> None:
        async with engine() as counter:
            await counter.wait_ready()
            counter.most_jobs = 2
            streams = [count(counter, f"j{i}", FOREVER, pause=0.001) for i in range(2)]
            with pytest.raises(Overloaded):
                count(counter, "one too many", 1)
            streams[0].close()
            assert len([event async for event in count(counter, "now", 1)]) == 2

    asyncio.run(go())


def test_ten_thousand_jobs_leave_nothing_behind() -> None:
    async def go() -> None:
        async with engine() as counter:
            await counter.wait_ready()
            before = len(asyncio.all_tasks())
            resident = 0
            for batch in range(100):
                streams = [count(counter, f"j{batch}-{i}", 1 if i % 2 else FOREVER) for i in range(100)]
                for i, stream in enumerate(streams):
                    await anext(stream)
                    if i % 2:
                        assert isinstance(await anext(stream), Ended)
                    else:
                        stream.close()
                if batch == 20:
                    resident = psutil.Process().memory_info().rss
            assert counter.jobs == 0
            assert len(asyncio.all_tasks()) == before
            assert psutil.Process().memory_info().rss - resident < 8 << 20
            while counter.stats.get("submitted") != 10_000.0 or counter.stats["running"]:
                await asyncio.sleep(0.05)

    asyncio.run(go())
