"""Arrivals on a simulated card: what streams and prompts wait for each other, in milliseconds of its clock."""

from __future__ import annotations

import random

import pytest

from polymux.core.batch.plan import Plan
from polymux.core.batch.scheduler import Scheduler
from polymux.core.batch.tokens import TILE
from polymux.core.cache.arena import Arena
from polymux.core.compute.device import Device
from polymux.core.engine.job import Job, JobHost
from polymux.core.testing.simulated import (
    QWEN3_8B_H200,
    Request,
    Served,
    SimulatedDecoder,
    SimulatedRow,
    SimulatedStage,
    percentile,
    simulate,
)

SLICE = 30.0


def arrive(rate: float, prompt: int, seconds: float) -> list[Request]:
    """Poisson arrivals; lengths between half and one and a half times their mean."""
    draw = random.Random(1)
    requests, at = [], 0.0
    while at < seconds * 1e3:
        requests.append(Request(at, draw.randint(prompt // 2, prompt * 3 // 2), draw.randint(64, 192)))
        at += 1e3 * draw.expovariate(rate)
    return requests


def serve(requests: list[Request]) -> list[Served]:
    served = simulate(requests, QWEN3_8B_H200, slice_ms=SLICE, grain=TILE)
    assert all(len(each.times) == each.request.answer for each in served)
    return served


@pytest.mark.parametrize(
    ("rate", "prompt", "first", "between"),
    [(8, 512, 49, 15), (32, 512, 100, 20), (8, 2400, 240, 35), (16, 2400, 1e9, 60)],
)
def test_streams_hardly_notice_prompts(rate: float, prompt: int, first: float, between: float) -> None:
    """99 of 100 first tokens come within `first`, and 99 of 100 others within `between` of the one before. At the
    highest load prompts come faster than the card computes them: there only the streams are held to it."""
    served = serve(arrive(rate, prompt, 6.0))
    assert percentile([each.first for each in served], 0.99) < first
    assert percentile([gap for each in served for gap in each.between], 0.99) < between


def test_a_very_long_prompt_stalls_no_stream() -> None:
    """32,768 tokens arrive in the middle of eight streams. A launch may last one and a half slices, and what a token
    costs grows with what it attends to, and is learned a little late."""
    streams = [Request(0.0, 64, 300) for _ in range(8)]
    served = serve([*streams, Request(500.0, 32_768, 1)])
    gaps = [gap for each in served for gap in each.between]
    assert max(gaps) < 2.25 * SLICE
    assert max(each.first for each in served) < 5_000


def test_a_prompt_alone_is_not_cut() -> None:
    """Nobody waits: it takes as few launches as it fits in."""
    (served,) = serve([Request(0.0, 3000, 1)])
    assert served.first < 1.1 * 3000 * (QWEN3_8B_H200.token + QWEN3_8B_H200.attend * 1.5)


def test_what_is_cut_is_cut_to_whole_tiles() -> None:
    """A launch of a tile and one token costs two tiles: pieces and streams together fill the last one, but for what
    ends a prompt with none behind it."""
    sizes: list[int] = []

    class Watched(SimulatedDecoder):
        def milliseconds(self, plan: Plan) -> float:
            if any(grant.count >= 64 and not grant.final for grant in plan.grants):
                sizes.append(plan.units)
            return super().milliseconds(plan)

    streams = [Request(0.0, 64, 200) for _ in range(9)]
    simulate(
        [*streams, Request(100.0, 9_000, 1), Request(110.0, 777, 1)],
        Watched(**vars(QWEN3_8B_H200)),
        slice_ms=SLICE,
        grain=TILE,
    )
    assert len(sizes) > 4
    assert all(size % TILE == 0 for size in sizes)


@pytest.mark.parametrize("spent", [0.0, 1000.0])
def test_what_feeds_another_stage_goes_first_for_a_while(spent: float) -> None:
    """Passes that cost as much as a step, of two lanes that always want: one has a head start of three, whatever it
    had spent before all rested."""
    stages = []
    for name in ("encode", "decode"):
        stage = SimulatedStage(max_rows=4, max_units=1, least_units=1, grain=1)
        stage.name = name
        stages.append(stage)
    stages[0].head_start_ms = 25.0
    scheduler = Scheduler(stages, Arena(1 << 16, Device().torch, 1 << 16), SLICE)
    host = JobHost(scheduler.enqueue, lambda stage, row: None)
    scheduler.lane(stages[0]).virtual_ms = spent
    for stage in stages:
        scheduler.enqueue(stage, SimulatedRow(Job(host, stage.name, "chat"), Served(Request(0.0, 100, 1))))
    order = []
    for _ in range(9):
        planned = scheduler.plan()
        assert planned is not None
        planned[0].charge(10.0, planned[1])
        order.append(planned[0].stage.name)
    assert order == ["encode"] * 3 + ["decode", "encode"] * 3


def test_new_rows_wait_for_company_while_others_use_the_device() -> None:
    """Of a lane with patience: not while nobody else does, not when a launch is full, and not for long."""
    stages = []
    for name in ("patient", "steps"):
        stage = SimulatedStage(max_rows=4, max_units=2, least_units=1, grain=1)
        stage.name = name
        stages.append(stage)
    patient, steps = stages
    patient.patience_ms, patient.head_start_ms = 1e6, 1e3
    scheduler = Scheduler(stages, Arena(1 << 16, Device().torch, 1 << 16), SLICE)
    host = JobHost(scheduler.enqueue, lambda stage, row: None)

    def arrive_at(stage: SimulatedStage) -> SimulatedRow:
        row = SimulatedRow(Job(host, stage.name, "chat"), Served(Request(0.0, 1, 50)))
        scheduler.enqueue(stage, row)
        return row

    def launched(*, busy: bool = False) -> str | None:
        planned = scheduler.plan(busy=busy)
        return planned[0].stage.name if planned is not None else None

    arrive_at(patient)
    assert launched(busy=True) is None, "one launch is out already"
    arrive_at(steps)
    assert launched() == "steps"
    arrive_at(patient)
    assert launched() == "patient", "its launch is full"
    late = arrive_at(patient)
    late.queued_at -= 1e4
    assert not scheduler.lane(patient).gathers, "it waited long enough"
    assert launched() == "patient"
