"""The loop's promises: the guilty fail alone, leaving frees within a step, nobody starves, the arena stays whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polymux.core.batch.oneshot import OneShotModel, OneShotRow, OneShotStage
from polymux.core.batch.sequence import TokenRequest, TokenRow
from polymux.core.batch.stage import Stage
from polymux.core.batch.tokens import TokenBatch, TokenModel, TokenStage
from polymux.core.cache.blocks import CacheSpec
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.engine.job import Job
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.engine.wire import unpack
from polymux.core.errors import InvalidRequest
from polymux.core.pipeline import Program
from polymux.core.tasks import Sampling
from polymux.core.testing.drive import Driver
from polymux.core.testing.tiny import build, tiny_llama

RAISES, NAN, FULL = 94, 95, 96
"""Token ids that make the model below raise, produce NaN, and run out of memory."""

GREEDY = Sampling(temperature=0.0)


class Delicate(TokenModel):
    """A tiny Llama that three tokens upset, each in its own way."""

    def __init__(self) -> None:
        model = build(tiny_llama)
        with torch.no_grad():
            model.get_input_embeddings().weight[NAN] = float("nan")
            model.get_output_embeddings().weight[[RAISES, NAN, FULL]] = 0.0
        self.inner = TransformersDecoder(model)
        self.shape = self.inner.shape
        self.launches = 0

    def forward(self, batch: TokenBatch) -> Tensor:
        self.launches += 1
        ids = batch.ids.tolist()
        if RAISES in ids:
            raise RuntimeError("this token upsets the model")
        if FULL in ids:
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
        return self.inner.forward(batch)


class Work(msgspec.Struct, kw_only=True, omit_defaults=True):
    prompt: list[int]
    tokens: int = 4
    item: int = 0


class Said(msgspec.Struct):
    text: str


Body = Callable[["Scripted", Job, Work], Awaitable[None]]


async def generate(program: Scripted, job: Job, work: Work) -> None:
    await job.start(program.tokens, program.row(job, work))


class Scripted(Program):
    """A program whose body is the test's own."""

    def __init__(self, body: Body = generate, *, tokens: TokenStage | None = None, items: OneShotStage | None = None):
        self.work = {"do": Work}
        self.stages: tuple[Stage, ...] = tuple(stage for stage in (tokens, items) if stage is not None)
        self.tokens: Any = tokens
        self.items: Any = items
        self.body = body

    async def run(self, job: Job, work: msgspec.Struct) -> None:
        assert isinstance(work, Work)
        await self.body(self, job, work)

    def row(self, job: Job, work: Work, branch: int = 0) -> TokenRow:
        return TokenRow(job, TokenRequest(work.prompt, work.tokens, GREEDY), branch)


@pytest.fixture(params=["cpu", "lagged"])
def device(request: pytest.FixtureRequest) -> Device:
    return LaggedCpu() if request.param == "lagged" else Device()


def make_site(device: Device, *, tokens: int = 4000, rows: int = 16, units: int = 64) -> Site:
    """A site whose cache holds so many tokens of the tiny Llama, in blocks of 4."""
    superpage = 4 * 1536
    pages = -(-tokens // 16)
    return Site(
        device,
        SiteSettings(max_rows=rows, max_units=units, block=4, cache_bytes=pages * superpage, superpage=superpage),
    )


def open_tokens(device: Device, body: Body = generate, **options: Any) -> Driver:
    site = make_site(device, **options)
    return Driver(Loop(site, {"m": Scripted(body, tokens=TokenStage("decode", Delicate(), site))}))


def submit(driver: Driver, job: str, prompt: list[int], *, tokens: int = 4, model: str = "m", **options: Any) -> None:
    driver.submit(job, model, "do", Work(prompt=prompt, tokens=tokens), **options)


def prompt_of(number: int, length: int = 7) -> list[int]:
    return [3 + (number * 11 + place * 5) % 90 for place in range(length)]


# ---- faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("poison", "says", "status"),
    [(RAISES, "RuntimeError", 500), (NAN, "not finite", 500), (FULL, "out of memory", 429)],
)
@pytest.mark.parametrize("place", [0, 4, 6])
def test_the_guilty_row_fails_alone(device: Device, poison: int, says: str, status: int, place: int) -> None:
    """Neighbours say what they say without it, its blocks never reach a later row, and the arena stays whole."""
    clean = open_tokens(device)
    for number in range(6):
        submit(clean, str(number), prompt_of(number), tokens=8)
    clean.finish()
    expected = [clean.tokens(str(number)) for number in range(6)]

    driver = open_tokens(type(device)(), tokens=256)
    for number in range(6):
        submit(driver, str(number), prompt_of(number), tokens=8)
        if number == 2:
            bad = prompt_of(20)
            bad[place] = poison
            submit(driver, "bad", bad, tokens=8)
    driver.finish()
    assert [driver.tokens(str(number)) for number in range(6)] == expected
    error = driver.error("bad")
    assert error is not None and says in error.message and error.status == status
    assert driver.tokens("bad") == []

    for number in range(6):  # the whole cache is used again: nothing of the bad row is left in it
        submit(driver, f"again {number}", prompt_of(number), tokens=8)
    submit(driver, "long", prompt_of(30, 150), tokens=8)
    submit(clean, "long", prompt_of(30, 150), tokens=8)
    driver.finish(), clean.finish()
    assert [driver.tokens(f"again {number}") for number in range(6)] == expected
    assert driver.tokens("long") == clean.tokens("long") != []


jobs_of_any_kind = st.tuples(
    st.integers(0, 5),  # whose prompt
    st.sampled_from([None, None, RAISES, NAN, FULL]),  # what is in it
    st.integers(0, 12),  # the step before which it joins
    st.one_of(st.none(), st.integers(0, 6)),  # steps after which it leaves
)


@settings(max_examples=30, deadline=None)
@given(
    jobs=st.lists(jobs_of_any_kind, min_size=1, max_size=10),
    lagged=st.booleans(),
    room=st.sampled_from([80, 128, 1000]),
    units=st.sampled_from([3, 16, 64]),
)
def test_any_mix_of_guilty_and_innocent(jobs: list[tuple], lagged: bool, room: int, units: int) -> None:
    """Whoever raises, goes wrong, leaves or is preempted: every innocent job that stays says what it says alone."""
    driver = open_tokens(LaggedCpu() if lagged else Device(), tokens=room, units=units)
    for step in range(20):
        for number, (whose, poison, join, leave) in enumerate(jobs):
            if join == step:
                prompt = prompt_of(whose, 15)
                submit(driver, str(number), [*prompt[:14], poison] if poison else prompt, tokens=8)
            if leave is not None and join + leave == step:
                driver.cancel(str(number))
        driver.step()
    driver.finish()
    for number, (whose, poison, _, leave) in enumerate(jobs):
        expected = alone(whose)
        tokens = driver.tokens(str(number))
        if poison:
            assert tokens == []
            assert leave is not None or driver.error(str(number)) is not None
        elif leave is not None:
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected


@cache
def alone(whose: int) -> list[int]:
    driver = open_tokens(Device())
    submit(driver, "it", prompt_of(whose, 15), tokens=8)
    driver.finish()
    return driver.tokens("it")


@pytest.mark.parametrize("poison", [RAISES, NAN])
@pytest.mark.parametrize("units", [8, 64])
def test_a_row_that_goes_wrong_in_the_middle_leaves_no_prefix(device: Device, poison: int, units: int) -> None:
    """A program that survives its failed row and asks again is not answered from the failed row's blocks.

    Under launch-ahead, the row's first chunk is still out when the second one fails.
    """
    heard: list[Exception] = []

    async def retry(program: Scripted, job: Job, work: Work) -> None:
        try:
            await job.start(program.tokens, program.row(job, Work(prompt=[*work.prompt, poison], tokens=9)))
        except Exception as error:
            heard.append(error)
        for branch in range(2):
            await job.start(program.tokens, program.row(job, work, branch))

    driver, clean = open_tokens(device, retry, units=units), open_tokens(type(device)())
    prompt = prompt_of(3, 16)
    submit(clean, "it", prompt, tokens=8)
    submit(driver, "it", prompt, tokens=8)
    driver.finish(), clean.finish()
    assert len(heard) == 1
    assert driver.tokens("it", 0) == driver.tokens("it", 1) == clean.tokens("it")


def test_a_failure_in_flight_is_not_told_as_tokens(device: Device) -> None:
    """The launch after a row's failure may already be out: what it brings is dropped."""

    async def together(program: Scripted, job: Job, work: Work) -> None:
        good = job.start(program.tokens, program.row(job, work))
        bad = job.start(program.tokens, program.row(job, Work(prompt=[5, NAN], tokens=20), branch=1))
        with pytest.raises(Exception, match="not finite"):
            await bad
        await good

    driver = open_tokens(device, together)
    submit(driver, "it", prompt_of(1), tokens=6)
    driver.finish()
    assert len(driver.tokens("it")) == 6
    assert driver.tokens("it", branch=1) == []
    assert driver.receipt("it") is not None


def test_branches_that_wait_for_a_failing_leader_fail_with_it(device: Device) -> None:
    """n choices share the first one's prompt: when it never starts, nobody waits for ever."""

    async def follow(program: Scripted, job: Job, work: Work) -> None:
        leader = job.start(program.tokens, program.row(job, work))
        await leader.started
        await job.start(program.tokens, program.row(job, work, branch=1))

    driver = open_tokens(device, follow)
    submit(driver, "it", [5, NAN])
    driver.finish()
    assert "not finite" in str(driver.error("it"))


def test_branches_go_on_when_the_leader_is_stopped_in_the_queue(device: Device) -> None:
    async def follow(program: Scripted, job: Job, work: Work) -> None:
        leader = job.start(program.tokens, program.row(job, work))
        await leader.started
        await job.start(program.tokens, program.row(job, work, branch=1))

    driver = open_tokens(device, follow, rows=1)
    submit(driver, "busy", prompt_of(2), tokens=10)
    submit(driver, "it", prompt_of(1))
    driver.run(steps=4)
    driver.cancel("it", branch=0)
    driver.finish()
    assert driver.tokens("it") == []
    assert len(driver.tokens("it", branch=1)) == 4


# ---- leaving -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_a_cancelled_job_is_gone_within_a_step(device: Device, steps: int) -> None:
    """In the queue, in the middle of the prompt, while it decodes: no row, no slot, no block is left."""
    driver = open_tokens(device, units=8)
    submit(driver, "it", prompt_of(1, 30), tokens=50)
    driver.run(steps=steps)
    driver.cancel("it")
    driver.step()
    stats = driver.loop.stats()
    assert (stats["jobs_running"], stats["rows_running"], stats["rows_waiting"]) == (0, 0, 0)
    driver.loop.check_integrity()
    told = len(driver.reports["it"])
    driver.run()
    assert len(driver.reports["it"]) == told, "nothing is said of a job that was cancelled"


def test_cancelling_what_is_unknown_or_over_is_no_error(device: Device) -> None:
    driver = open_tokens(device)
    driver.cancel("nobody")
    submit(driver, "it", prompt_of(1))
    driver.run()
    driver.cancel("it")
    driver.finish()
    assert driver.receipt("it") is not None


def test_one_branch_leaves_and_the_others_go_on(device: Device) -> None:
    async def fork(program: Scripted, job: Job, work: Work) -> None:
        for row in [job.start(program.tokens, program.row(job, work, branch)) for branch in range(3)]:
            await row

    driver = open_tokens(device, fork)
    submit(driver, "it", prompt_of(1), tokens=20)
    driver.run_until_token("it", 9)
    driver.cancel("it", branch=1)
    told = len(driver.tokens("it", branch=1))
    driver.finish()
    assert [len(driver.tokens("it", branch=branch)) for branch in range(3)] == [20, told, 20]


def test_a_deadline_ends_a_job_in_the_queue_and_while_it_runs(device: Device) -> None:
    driver = open_tokens(device, rows=1)
    submit(driver, "running", prompt_of(1), tokens=3000, deadline=0.6)
    submit(driver, "queued", prompt_of(2), tokens=4, deadline=0.3)
    submit(driver, "fine", prompt_of(3), tokens=4, deadline=60)
    driver.finish()
    for job in ("running", "queued"):
        error = driver.error(job)
        assert error is not None and error.status == 504
    assert 0 < len(driver.tokens("running")) < 3000
    assert len(driver.tokens("fine")) == 4


# ---- order and room ----------------------------------------------------------------------------------------------


def test_a_higher_priority_runs_first_and_equals_in_order_of_arrival(device: Device) -> None:
    driver = open_tokens(device, rows=1)
    for job, priority in (("first", 0), ("second", 0), ("urgent", 5), ("idle", -5)):
        submit(driver, job, prompt_of(1), priority=priority)
    driver.finish()
    ends = {job: driver.receipt(job) for job in ("urgent", "first", "second", "idle")}
    times = [receipt.first_ms for receipt in ends.values() if receipt]
    assert times == sorted(times) and len(times) == 4


def test_the_newest_of_the_lowest_priority_makes_room(device: Device) -> None:
    """Six rows grow in a cache for two: the first of the highest priority is never preempted, and all are answered."""
    preempted: dict[str, int] = {}

    async def count(program: Scripted, job: Job, work: Work) -> None:
        row = await job.start(program.tokens, program.row(job, work))
        preempted[job.id] = row.preempted

    driver = open_tokens(device, count, tokens=96)
    for number in range(6):
        submit(driver, str(number), prompt_of(number), tokens=30, priority=int(number == 4))
    driver.finish()
    assert all(len(driver.tokens(str(number))) == 30 for number in range(6))
    assert preempted["4"] == 0
    assert sum(preempted.values()) > 0


def test_a_request_that_can_never_fit_fails_clearly(device: Device) -> None:
    driver = open_tokens(device, tokens=64)
    submit(driver, "before", prompt_of(1))
    submit(driver, "huge", prompt_of(2, 200))
    submit(driver, "grows", prompt_of(3), tokens=200)
    submit(driver, "after", prompt_of(4))
    driver.finish()
    for job in ("huge", "grows"):
        error = driver.error(job)
        assert error is not None and "more cache than this engine has" in error.message
    assert len(driver.tokens("before")) == len(driver.tokens("after")) == 4


def test_two_models_share_one_arena(device: Device) -> None:
    """One model's forgotten prefixes, and then its running rows, make room for the other's; nobody fails."""
    site = make_site(device, tokens=96)
    programs = {name: Scripted(tokens=TokenStage("decode", Delicate(), site)) for name in "ab"}
    driver = Driver(Loop(site, programs))
    for number in range(4):
        submit(driver, f"fill {number}", prompt_of(number, 24), model="a")
    driver.run()
    assert driver.loop.stats()["cache_usage_ratio"] == 1.0
    submit(driver, "other", prompt_of(1, 24), model="b")
    driver.run()
    assert len(driver.tokens("other")) == 4
    for name in "ab":  # each fits alone, not both
        submit(driver, f"long {name}", prompt_of(7, 20), tokens=50, model=name)
    driver.finish()
    assert driver.tokens("long a") == driver.tokens("long b")
    assert len(driver.tokens("long a")) == 50


# ---- stages beside each other ------------------------------------------------------------------------------------


class Pause(OneShotModel):
    """Items that take `seconds` each, on whatever thread runs them."""

    def __init__(self, seconds: float, slab: CacheSpec | None = None) -> None:
        self.seconds = seconds
        self.slab = slab
        self.threads: set[str] = set()
        self.sizes: list[int] = []
        """Items of each pass."""

    def forward(self, items: list[Any], slabs: list[Tensor]) -> list[Any]:
        self.sizes.append(len(items))
        self.threads.add(threading.current_thread().name)
        for item in items:
            if item == FULL:
                raise MemoryError
        for number, slab in enumerate(slabs):
            slab.fill_(items[number])
        time.sleep(self.seconds * len(items))
        return [InvalidRequest("no such item") if item == RAISES else item * 2 for item in items]


async def double(program: Scripted, job: Job, work: Work) -> None:
    row = await job.start(program.items, OneShotRow(job, work.item, 1))
    job.emit("said", Said(str(row.result)))


def test_stages_share_device_time(device: Device) -> None:
    """Two stages with plenty to do get about the same share, though one's launches are eight times as long."""
    site = make_site(device)
    cheap = OneShotStage("cheap", Pause(0.001), site, max_units=1)
    dear = OneShotStage("dear", Pause(0.008), site, max_units=1)
    driver = Driver(Loop(site, {"cheap": Scripted(double, items=cheap), "dear": Scripted(double, items=dear)}))
    for number in range(60):
        driver.submit(f"cheap {number}", "cheap", "do", Work(prompt=[], item=1))
        driver.submit(f"dear {number}", "dear", "do", Work(prompt=[], item=1))
    driver.run(steps=50)
    spent = {name: lane.virtual_ms for name, lane in driver.loop.scheduler.lanes.items()}
    assert 0.5 < spent["cheap/cheap"] / spent["dear/dear"] < 2.0
    driver.finish()


def test_long_launches_are_cut_while_another_stage_waits() -> None:
    """A stage that has learned its cost runs slices, not its full budget, when it is not alone."""
    site = make_site(Device())
    model = Pause(0.01)
    slow = OneShotStage("slow", model, site, max_units=64)
    other = OneShotStage("other", Pause(0.001), site, max_units=1)
    driver = Driver(Loop(site, {"slow": Scripted(double, items=slow), "other": Scripted(double, items=other)}))
    driver.submit("warm", "slow", "do", Work(prompt=[], item=1))
    driver.run()
    for number in range(20):
        driver.submit(f"slow {number}", "slow", "do", Work(prompt=[], item=1))
        driver.submit(f"other {number}", "other", "do", Work(prompt=[], item=1))
    driver.finish()
    assert model.sizes[1] <= site.settings.slice_ms / 10
    assert sum(model.sizes) == 21


def test_a_pass_on_the_host_runs_beside_tokens(device: Device) -> None:
    """Tokens come while the host computes, on its own thread; every item is answered."""
    site = make_site(device)
    model = Pause(0.05)
    items = OneShotStage("voice", model, site, max_units=4, on_host=True)
    tokens = TokenStage("decode", Delicate(), site)
    driver = Driver(Loop(site, {"voice": Scripted(double, items=items), "m": Scripted(tokens=tokens)}))
    for number in range(6):
        driver.submit(f"voice {number}", "voice", "do", Work(prompt=[], item=number))
    driver.step()
    submit(driver, "text", prompt_of(1), tokens=12)
    driver.run_until_token("text", 12)
    beside = sum(bool(driver.reports[f"voice {number}"]) for number in range(6))
    driver.finish()
    assert beside < 6, "the host's pass held the tokens up"
    assert [said.text for number in range(6) for said in driver.outputs(f"voice {number}", "said", Said)] == [
        str(number * 2) for number in range(6)
    ]
    assert all(name.startswith("host-pass") for name in model.threads)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_guilty_item_fails_alone(device: Device, on_host: bool) -> None:
    """Whether the pass raises or answers with an error in the item's place."""
    site = make_site(device)
    stage = OneShotStage("items", Pause(0.0), site, max_units=16, on_host=on_host)
    driver = Driver(Loop(site, {"m": Scripted(double, items=stage)}))
    for item in [1, FULL, 2, RAISES, 3]:
        driver.submit(str(item), "m", "do", Work(prompt=[], item=item))
    driver.finish()
    assert [driver.outputs(str(item), "said", Said)[0].text for item in (1, 2, 3)] == ["2", "4", "6"]
    assert "out of memory" in str(driver.error(str(FULL)))
    assert str(driver.error(str(RAISES))) == "no such item"


def test_what_a_row_leaves_belongs_to_its_job(device: Device) -> None:
    """A slab is written by the pass, held by the job, and free once the job ends, drops it, or is cancelled."""
    site = make_site(device)
    spec = CacheSpec("slab", (1, 2, 2, 1, 8), torch.float32, 2)
    stage = OneShotStage("encode", Pause(0.0, spec), site, max_units=9)
    marks: list[float] = []

    async def keep(program: Scripted, job: Job, work: Work) -> None:
        row = OneShotRow(job, work.item, 9)  # larger than the slab's units: still one slab
        row.keeps = True
        await job.start(program.items, row)
        assert row.holding is not None and len(row.holding.blocks) == 1
        marks.append(float(stage._slabs[row.holding.blocks[0]].mean()))
        if work.item == 1:
            job.drop(row.holding)
        await job.receive()

    driver = Driver(Loop(site, {"m": Scripted(keep, items=stage)}))
    for item in (1, 2, 3):
        driver.submit(str(item), "m", "do", Work(prompt=[], item=item))
    driver.run()
    pool = driver.loop.scheduler.lane(stage).residency.pool
    assert pool is not None and pool.held == 2
    assert sorted(marks) == [1.0, 2.0, 3.0]
    driver.cancel("2")
    assert pool.held == 1
    driver.post("1", Said("")), driver.post("3", Said(""))
    driver.finish()
    assert pool.held == 0


# ---- programs ----------------------------------------------------------------------------------------------------


def open_program(body: Body) -> Driver:
    return Driver(Loop(make_site(Device()), {"m": Scripted(body)}))


def test_a_program_spawns_and_gathers() -> None:
    async def gather(program: Scripted, job: Job, work: Work) -> None:
        async def part(number: int) -> int:
            await job.receive()
            return number * 10

        parts = [job.spawn(part(number)) for number in range(3)]
        job.emit("said", Said(str([await signal for signal in parts])))

    driver = open_program(gather)
    driver.submit("it", "m", "do", Work(prompt=[]))
    for _ in range(3):
        driver.run()
        assert driver.receipt("it") is None
        driver.post("it", Said("go"))
    driver.finish()
    assert [said.text for said in driver.outputs("it", "said", Said)] == ["[0, 10, 20]"]


def test_messages_arrive_in_order_however_they_come() -> None:
    async def echo(program: Scripted, job: Job, work: Work) -> None:
        for _ in range(work.tokens):
            job.emit("said", unpack(await job.receive(), Said))

    driver = open_program(echo)
    driver.submit("it", "m", "do", Work(prompt=[], tokens=5))
    for number in range(5):
        driver.post("it", Said(str(number)))
        if number % 2:
            driver.run()
    driver.post("nobody", Said("lost"))
    driver.finish()
    assert [said.text for said in driver.outputs("it", "said", Said)] == list("01234")


async def raises(program: Scripted, job: Job, work: Work) -> None:
    raise KeyError("a bug")


async def raises_in_a_strand(program: Scripted, job: Job, work: Work) -> None:
    await job.spawn(raises(program, job, work))


async def awaits_a_stranger(program: Scripted, job: Job, work: Work) -> None:
    class Stranger:
        def __await__(self) -> Any:
            yield "something of another event loop"

    await Stranger()


async def exits(program: Scripted, job: Job, work: Work) -> None:
    raise SystemExit(1)


@pytest.mark.parametrize("body", [raises, raises_in_a_strand, awaits_a_stranger, exits])
def test_a_bug_in_a_program_fails_its_job_alone(body: Body) -> None:
    site = make_site(Device())
    driver = Driver(
        Loop(site, {"bad": Scripted(body), "m": Scripted(generate, tokens=TokenStage("decode", Delicate(), site))})
    )
    submit(driver, "fine", prompt_of(1))
    submit(driver, "bad", [], model="bad")
    driver.finish()
    error = driver.error("bad")
    assert error is not None and error.status == 500
    assert "a bug" not in error.message, "what a bug says is for the log"
    assert len(driver.tokens("fine")) == 4


def test_a_program_that_is_no_coroutine_fails_its_job_alone() -> None:
    class Wrong(Program):
        def __init__(self) -> None:
            self.work = {"do": Work}
            self.stages = ()

        def run(self, job: Job, work: msgspec.Struct) -> Any:
            raise ValueError("async was forgotten")

    driver = Driver(Loop(make_site(Device()), {"m": Wrong()}))
    driver.submit("it", "m", "do", Work(prompt=[]))
    driver.finish()
    assert driver.error("it") is not None


def test_a_clean_up_that_awaits_does_not_hurt_the_engine() -> None:
    async def stubborn(program: Scripted, job: Job, work: Work) -> None:
        try:
            await job.receive()
        finally:
            await job.receive()

    driver = open_program(stubborn)
    driver.submit("it", "m", "do", Work(prompt=[]))
    driver.run()
    driver.cancel("it")
    driver.finish()


def test_a_command_that_makes_no_sense_fails_that_job() -> None:
    driver = open_program(raises)
    driver.submit("model", "nothing", "do", Work(prompt=[]))
    driver.submit("task", "m", "sing", Work(prompt=[]))
    driver.submit("work", "m", "do", Said("not this kind"))
    driver.finish()
    assert [error.status for job in ("model", "task", "work") if (error := driver.error(job))] == [400, 400, 500]
