"""Programs: strands, messages, and bugs that stay with their job."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.device import Device
from polymux.core.engine.job import Job
from polymux.core.engine.loop import Loop
from polymux.core.engine.wire import unpack
from polymux.core.pipeline import Program
from polymux.core.testing.drive import Driver
from polymux.core.testing.scripted import (
    Body,
    Delicate,
    Said,
    Scripted,
    Work,
    generate,
    make_site,
    prompt_of,
    submit,
)


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


def test_every_program_is_closed_even_if_one_fails_to() -> None:
    class Closing(Scripted):
        closed = 0

        def close(self) -> None:
            self.closed += 1
            raise RuntimeError("no")

    programs = {name: Closing() for name in "ab"}
    Loop(make_site(Device()), programs).close()
    assert [program.closed for program in programs.values()] == [1, 1]


def test_a_receipt_counts_the_launches_its_job_was_in() -> None:
    """Five tokens are one launch for the prompt and four more, however many others are in them."""
    driver = Driver(Loop(site := make_site(Device()), {"m": Scripted(tokens=TokenStage("decode", Delicate(), site))}))
    submit(driver, "long", prompt_of(1), tokens=9)
    submit(driver, "short", prompt_of(2), tokens=5)
    driver.finish()
    receipts = [driver.receipt(job) for job in ("long", "short")]
    assert [receipt and receipt.launches for receipt in receipts] == [9, 5]
