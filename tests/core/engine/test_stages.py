"""Stages beside each other: shared device time, passes on the host, and what a row leaves behind."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from polymux.core.batch.decoder import TokenBatch
from polymux.core.batch.oneshot import OneShotModel, OneShotRow, OneShotStage
from polymux.core.batch.tokens import TokenStage
from polymux.core.cache.blocks import CacheSpec
from polymux.core.compute.device import Device
from polymux.core.engine.job import Job
from polymux.core.engine.loop import Loop
from polymux.core.testing.drive import Driver
from polymux.core.testing.scripted import (
    FULL,
    RAISES,
    Delicate,
    Pause,
    Said,
    Scripted,
    Work,
    double,
    make_site,
    prompt_of,
    submit,
)


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


def test_passes_that_share_nothing_run_on_a_core_each(device: Device) -> None:
    """Neither ends before both have begun."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        site, meeting = make_site(device), threading.Barrier(2)
        stage = OneShotStage("voice", Meeting(meeting), site, max_units=1, on_host=True)
        driver = Driver(Loop(site, {"m": Scripted(double, items=stage)}))
        for number in range(4):
            driver.submit(str(number), "m", "do", Work(prompt=[], item=number))
        driver.finish()
    finally:
        torch.set_num_threads(threads)
    assert [said.text for number in range(4) for said in driver.outputs(str(number), "said", Said)] == list("0246")


class Meeting(OneShotModel):
    apart = True

    def __init__(self, meeting: threading.Barrier) -> None:
        self._meeting = meeting

    def forward(self, items: list[Any], slabs: list[Tensor]) -> list[Any]:
        self._meeting.wait(timeout=60)
        return [2 * item for item in items]


@pytest.mark.parametrize(("on_host", "apart"), [(False, False), (True, False), (True, True)])
def test_a_guilty_item_fails_alone(device: Device, on_host: bool, apart: bool) -> None:
    """Whether the pass raises or answers with an error in the item's place."""
    site, model = make_site(device), Pause(0.0)
    model.apart = apart
    stage = OneShotStage("items", model, site, max_units=16, on_host=on_host)
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


class Slow(Delicate):
    """Half a millisecond a token; remembers how many each launch had."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def forward(self, batch: TokenBatch) -> Tensor:
        self.sizes.append(len(batch.ids))
        time.sleep(len(batch.ids) * 5e-4)
        return super().forward(batch)


def test_a_long_prompt_does_not_hold_up_a_stream() -> None:
    """Beside a row that decodes, a prompt is computed in slices of time; every launch gives the stream its token."""
    model = Slow()
    site = make_site(Device(), units=2000)
    driver = Driver(Loop(site, {"m": Scripted(tokens=TokenStage("decode", model, site))}))
    submit(driver, "stream", prompt_of(1, 100), tokens=60)
    driver.run_until_token("stream", 3)
    before = len(model.sizes)
    submit(driver, "long", prompt_of(2, 400), tokens=1)
    seen = len(driver.tokens("stream"))
    driver.run_until_token("long")
    launches = model.sizes[before:]
    assert len(launches) >= 3  # 400 tokens of half a millisecond, in slices of 50 ms
    assert len(driver.tokens("stream")) - seen >= len(launches) - 1
    driver.finish()
