"""What a gateway relies on: names, statuses, prepared asks, and that leaving at any point stops the work."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from polymux.core.engine.client import Engine
from polymux.core.engine.lease import process_pool
from polymux.core.engine.spec import EngineSpec
from polymux.core.engine.supervisor import EngineProcess, Restarts
from polymux.core.engine.wire import INLINE_BYTES, unpack
from polymux.core.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineDied,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NotReady,
    Overloaded,
    PolymuxError,
)
from polymux.core.pipeline import Front, Prepared, Presenter
from polymux.core.preparers import Preparers
from polymux.core.service import Served, Service
from polymux.core.tasks import Done, TextDelta
from polymux.core.testing.counting import COMMAND, Count, CountingLoop, Echo
from polymux.core.testing.engine import LocalEngine
from polymux.core.vocabulary import Ended, Event, Output, Receipt, Tokens, Usage

FOREVER = 10**9


class Ask(msgspec.Struct):
    """Count to `n`; The callables run where their names say."""

    n: int = 1
    unneeded: list[int] = []
    work: dict[str, Any] = {}
    prepare: Callable[[], None] = lambda: None
    feed: Callable[[], None] = lambda: None
    messages: Iterable[msgspec.Struct] = ()


class CountFront(Front):
    def prepare(self, task: str, ask: Ask) -> Prepared:  # type: ignore[override]
        ask.prepare()
        work = Echo(np.zeros(ask.n)) if task == "echo" else Count(ask.n, **ask.work)
        return Prepared(work, messages=ask.messages)

    def present(self, task: str, ask: Ask, prepared: Prepared) -> Presenter:  # type: ignore[override]
        return CountPresenter(ask)

    def describe(self) -> dict[str, Any]:
        return {"context_length": 10}


class CountPresenter(Presenter):
    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.count = 0

    def take_unneeded(self) -> list[int]:
        unneeded, self.ask.unneeded = self.ask.unneeded, []
        return unneeded

    def feed(self, event: Event) -> list[msgspec.Struct]:
        self.ask.feed()
        if isinstance(event, Output):
            return [TextDelta(0, str(unpack(event.body, Echo).array.size))]
        if isinstance(event, Tokens):
            self.count += len(event.ids)
            return [TextDelta(0, str(token)) for token in event.ids]
        assert isinstance(event, Ended)
        return [Done(Usage(output_tokens=self.count), event.receipt)]


@asynccontextmanager
async def serve(engine: Engine | None = None, preparers: Preparers | None = None) -> AsyncIterator[Service]:
    engine = engine or LocalEngine({}, make_loop=CountingLoop)
    served = Served("counter", ("count", "echo"), CountFront(), engine, aliases=("gpt-count",))
    service = Service([served], preparers)
    await service.start()
    await service.wait_ready()
    try:
        yield service
    finally:
        await service.stop()


async def ask(service: Service, ask: Ask, task: str = "count", **more: Any) -> list[Any]:
    async with service.open("counter", task, ask, **more) as answers:
        return [answer async for answer in answers]


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def loop_of(service: Service) -> CountingLoop:
    engine = service.engines[0]
    assert isinstance(engine, LocalEngine)
    assert isinstance(engine.loop, CountingLoop)
    return engine.loop


def test_answers_come_in_order_and_end_with_done() -> None:
    async def go() -> None:
        async with serve() as service:
            *deltas, done = await ask(service, Ask(3))
            assert [delta.text for delta in deltas] == ["0", "1", "2"]
            assert done == Done(Usage(output_tokens=3), Receipt(output_units=3))
            assert (await ask(service, Ask(INLINE_BYTES), "echo"))[0].text == str(INLINE_BYTES)
            assert process_pool().outstanding == 0

    asyncio.run(go())


def test_models_are_found_by_name_and_alias_and_described() -> None:
    async def go() -> None:
        async with serve() as service:
            assert service.names() == ["counter"]
            assert service.find("gpt-count") is service.find("counter")
            with pytest.raises(ModelNotFound, match="'nobody' is not served here; served: counter") as caught:
                service.open("nobody", "count", Ask())
            assert caught.value.status == 404
            with pytest.raises(
                InvalidRequest, match="counter does not serve 'chat'; it serves: count, echo"
            ) as refused:
                service.open("counter", "chat", Ask())
            assert (refused.value.status, refused.value.param) == (400, "model")
            assert service.ready
            assert service.describe()["models"] == {"counter": {"context_length": 10}}
        assert not service.ready

    asyncio.run(go())


def test_numbers_of_several_engines_are_summed_and_ratios_are_not() -> None:
    async def go() -> None:
        engines = [LocalEngine({}, make_loop=CountingLoop, name=name) for name in "ab"]
        service = Service(Served(engine.name, ("count",), CountFront(), engine) for engine in engines)
        engines[0].stats = {"jobs_running": 3.0, "cache_usage_ratio": 0.9}
        engines[1].stats = {"jobs_running": 1.0, "cache_usage_ratio": 0.3}
        assert service.stats == {"jobs_running": 4.0, "cache_usage_ratio": pytest.approx(0.6)}

    asyncio.run(go())


def test_two_models_cannot_share_a_name() -> None:
    async def go() -> None:
        engine = LocalEngine({}, make_loop=CountingLoop)
        models = [Served(name, ("count",), CountFront(), engine, aliases=("gpt",)) for name in ("a", "b")]
        with pytest.raises(ConfigError, match="gpt"):
            Service(models)

    asyncio.run(go())


def raise_it(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def fail_midway() -> Iterator[msgspec.Struct]:
    yield Count(7)
    raise InvalidRequest("the upload is cut off", param="file")


@pytest.mark.parametrize(
    ("bad", "kind", "status", "words"),
    [
        (Ask(prepare=raise_it(InvalidRequest("too long", param="n"))), InvalidRequest, 400, "too long"),
        (Ask(prepare=raise_it(KeyError("x"))), InternalError, 500, "preparing this count request failed: KeyError"),
        (Ask(prepare=raise_it(TimeoutError("x"))), InternalError, 500, "TimeoutError"),
        (Ask(feed=raise_it(ValueError("x"))), InternalError, 500, "presenting this count request failed: ValueError"),
        (Ask(work={"fail": True}), PolymuxError, 400, "told to fail"),
        (Ask(work={"wait": 2}, messages=fail_midway()), InvalidRequest, 400, "cut off"),
    ],
    ids=["bad ask", "front's bug", "front's own timeout", "presenter's bug", "program fails", "upload breaks"],
)
def test_a_failing_request_fails_alone_with_its_own_status(
    bad: Ask, kind: type[PolymuxError], status: int, words: str
) -> None:
    async def go() -> None:
        async with serve() as service:
            with pytest.raises(kind, match=words) as caught:
                await ask(service, bad, deadline=60)
            assert caught.value.status == status
            assert len(await ask(service, Ask(2))) == 3
            await until(lambda: not loop_of(service).running)
            assert service.engines[0].jobs == 0

    asyncio.run(go())


def test_an_unneeded_branch_stops_once_and_the_job_goes_on() -> None:
    async def go() -> None:
        async with serve() as service:
            answers = await ask(service, Ask(3, unneeded=[2], work={"pause": 0.05}), request_id="r")
            assert len(answers) == 4
            await until(lambda: loop_of(service).stopped == [("r-1", 2)])

    asyncio.run(go())


def test_leaving_a_stream_cancels_within_a_step() -> None:
    async def go() -> None:
        async with serve() as service:
            async with service.open("counter", "count", Ask(FOREVER, work={"pause": 0.001})) as answers:
                assert await anext(answers) == TextDelta(0, "0")
            assert service.engines[0].jobs == 0
            await until(lambda: loop_of(service).cancelled == [answers.job], 1.0)

    asyncio.run(go())


def test_a_caller_that_is_cancelled_while_it_waits_cancels_the_job() -> None:
    async def go() -> None:
        async with serve() as service:
            caller = asyncio.create_task(ask(service, Ask(0, work={"wait": 1})))
            await until(lambda: bool(loop_of(service).running))
            caller.cancel()
            await asyncio.gather(caller, return_exceptions=True)
            await until(lambda: not loop_of(service).running, 1.0)

    asyncio.run(go())


def test_leaving_while_the_ask_is_prepared_submits_nothing_and_returns_its_memory() -> None:
    async def go() -> None:
        async with serve() as service:
            begun, go_on = threading.Event(), threading.Event()
            slow = Ask(INLINE_BYTES, prepare=lambda: (begun.set(), go_on.wait(5))[0])
            caller = asyncio.create_task(ask(service, slow, "echo"))
            await until(begun.is_set)
            caller.cancel()
            await asyncio.gather(caller, return_exceptions=True)
            go_on.set()
            assert len(await ask(service, Ask(1))) == 2
            await until(lambda: process_pool().outstanding == 0)
            assert loop_of(service).submitted == 1

    asyncio.run(go())


def test_an_engine_is_not_idle_while_a_request_for_it_is_prepared() -> None:
    """Or it could be retired under a request that found it while it still served."""

    async def go() -> None:
        async with serve() as service:
            engine = service.engines[0]
            assert engine.idle
            begun, go_on = threading.Event(), threading.Event()
            slow = Ask(1, prepare=lambda: (begun.set(), go_on.wait(5))[0])
            caller = asyncio.create_task(ask(service, slow))
            await until(begun.is_set)
            assert not engine.idle and not engine.jobs
            go_on.set()
            assert len(await caller) == 2
            assert engine.idle

    asyncio.run(go())


def test_leaving_while_the_ask_waits_for_a_thread_never_prepares_it() -> None:
    async def go() -> None:
        async with serve(preparers=Preparers(threads=1)) as service:
            begun, go_on, prepared = threading.Event(), threading.Event(), threading.Event()
            first = asyncio.create_task(ask(service, Ask(prepare=lambda: (begun.set(), go_on.wait(5))[0])))
            await until(begun.is_set)
            second = asyncio.create_task(ask(service, Ask(prepare=prepared.set)))
            await asyncio.sleep(0)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            go_on.set()
            await first
            assert not prepared.is_set()

    asyncio.run(go())


def test_a_full_queue_of_asks_answers_at_once() -> None:
    async def go() -> None:
        async with serve(preparers=Preparers(threads=1, most_waiting=1)) as service:
            go_on = threading.Event()
            waiting = [asyncio.create_task(ask(service, Ask(prepare=lambda: go_on.wait(5)))) for _ in range(2)]
            await asyncio.sleep(0.01)
            with pytest.raises(Overloaded) as caught:
                await ask(service, Ask())
            assert caught.value.status == 429
            assert caught.value.retry_after
            go_on.set()
            await asyncio.gather(*waiting)
            assert len(await ask(service, Ask())) == 2

    asyncio.run(go())


@pytest.mark.parametrize(
    "late",
    [Ask(prepare=lambda: time.sleep(0.2)), Ask(0, work={"wait": 1}), Ask(FOREVER, work={"pause": 0.001})],
    ids=["preparing", "waiting", "streaming"],
)
def test_a_passed_deadline_is_a_504_and_stops_the_work(late: Ask) -> None:
    async def go() -> None:
        async with serve() as service:
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded) as caught:
                await ask(service, late, deadline=0.1)
            assert caught.value.status == 504
            assert time.monotonic() - began < 1.0
            await until(lambda: not loop_of(service).running)
            assert len(await ask(service, Ask(), deadline=10)) == 2

    asyncio.run(go())


def test_messages_are_read_lazily_off_the_event_loop_and_posted_in_order() -> None:
    threads: set[str] = set()

    def upload() -> Iterator[msgspec.Struct]:
        for n in range(100, 120):
            threads.add(threading.current_thread().name)
            yield Count(n)

    async def go() -> None:
        async with serve() as service:
            answers = await ask(service, Ask(0, work={"wait": 20}, messages=upload()))
            assert [answer.text for answer in answers[:-1]] == [str(n) for n in range(100, 120)]

    asyncio.run(go())
    assert all(name.startswith("preparers") for name in threads)


def test_nothing_is_prepared_for_an_engine_that_is_not_ready() -> None:
    async def go() -> None:
        engine = LocalEngine({}, make_loop=CountingLoop)
        service = Service([Served("counter", ("count",), CountFront(), engine)])
        with pytest.raises(NotReady, match="loading"):
            await ask(service, Ask(prepare=raise_it(AssertionError("prepared"))))

    asyncio.run(go())


def test_killing_the_engine_mid_stream_is_an_error_at_once_then_the_next_request_works() -> None:
    async def go() -> None:
        engine = EngineProcess(EngineSpec(name="counter"), command=COMMAND, restarts=Restarts(first=0.05))
        async with serve(engine) as service:
            async with service.open("counter", "count", Ask(FOREVER)) as answers:
                await anext(answers)
                killed = time.monotonic()
                os.kill(engine.pid or 0, signal.SIGKILL)
                with pytest.raises(EngineDied) as caught:
                    async for _ in answers:
                        pass
            assert time.monotonic() - killed < 1.0
            assert (caught.value.status, caught.value.code) == (503, "engine_died")
            assert not service.ready
            await service.wait_ready()
            assert service.ready
            assert len(await ask(service, Ask(2))) == 3

    asyncio.run(go())


def test_thousands_of_requests_left_at_random_leave_nothing_behind() -> None:
    async def go() -> None:
        async with serve() as service:
            before = len(asyncio.all_tasks())
            resident = 0

            async def one(i: int) -> None:
                async with service.open("counter", "count", Ask(i % 5), deadline=60) as answers:
                    async for _ in answers:
                        if i % 3 == 0:
                            break

            for batch in range(50):
                callers = [asyncio.create_task(one(i)) for i in range(100)]
                await asyncio.sleep(0)
                callers[batch].cancel()
                await asyncio.gather(*callers, return_exceptions=True)
                if batch == 20:
                    resident = psutil.Process().memory_info().rss
            assert service.engines[0].jobs == 0
            await until(lambda: not loop_of(service).running)
            assert len(asyncio.all_tasks()) == before
            assert psutil.Process().memory_info().rss - resident < 8 << 20
            assert process_pool().outstanding == 0

    asyncio.run(go())


def test_the_gateways_side_imports_no_torch() -> None:
    script = "import sys, polymux.core.service, polymux.core.engine.supervisor; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
