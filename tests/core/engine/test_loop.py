"""The loop: leaving frees within a step, the order is kept, and there is room or a clear answer."""

from __future__ import annotations

import pytest

from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.device import Device
from polymux.core.engine.job import Job
from polymux.core.engine.loop import Loop
from polymux.core.testing.drive import Driver
from polymux.core.testing.scripted import (
    Delicate,
    Scripted,
    Work,
    make_site,
    open_tokens,
    prompt_of,
    submit,
)


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
        assert (error.status, error.code) == (400, "context_length_exceeded"), "trying again would not help"
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


def test_later_launches_are_prepared_when_nobody_came_for_a_while(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording takes longer than a short pause between two requests may last."""
    clock = 0.0
    prepared: list[float] = []

    def tend() -> bool:
        prepared.append(clock)
        return len(prepared) < 2

    driver = open_tokens(device)
    driver.loop._quiet = 0.2
    monkeypatch.setattr("time.monotonic", lambda: clock)
    monkeypatch.setattr(driver.loop.scheduler, "tend", tend)
    for begin in (0.0, 0.1):  # the second comes in a pause
        clock = begin
        submit(driver, str(begin), prompt_of(1), tokens=2)
        driver.run()
    clock = 0.25
    assert not driver.step()
    assert not prepared
    clock = 0.35
    assert driver.step()
    assert not driver.step()
    assert prepared == [0.35, 0.35]
