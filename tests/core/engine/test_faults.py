"""The guilty row fails alone: neighbours say what they say without it, and nothing of it is left."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.engine.job import Job
from polymux.core.testing.scripted import (
    FULL,
    NAN,
    RAISES,
    Scripted,
    Work,
    open_tokens,
    prompt_of,
    submit,
)


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
