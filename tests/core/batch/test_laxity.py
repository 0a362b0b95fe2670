"""Who goes first among denoising rows: the urgent, the short, and whoever has waited long enough."""

from __future__ import annotations

import torch

from polymux.core.batch.cost import LaunchCost
from polymux.core.batch.denoise import PROGRESS, DenoiseStage
from polymux.core.batch.laxity import order
from polymux.core.batch.trajectory import DenoiseRequest, DenoiseRow
from polymux.core.cache.stepcache import DeepCache
from polymux.core.compute.device import Device
from polymux.core.engine.job import Job, JobHost
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.testing.denoising import (
    CHANNELS,
    JOINT,
    POOLED,
    DenoiseProgram,
    DenoiseWork,
    flow_scheduler,
    tiny_flux,
)
from polymux.core.testing.drive import Driver
from polymux.core.vocabulary import Output
from polymux.modalities.diffusion import flux


def make_request(steps: int, rule: DeepCache | None = None) -> DenoiseRequest:
    shape = (CHANNELS, 8, 8)
    conditions = {
        flux.PROMPT: torch.randn(5, JOINT),
        flux.POOLED: torch.randn(POOLED),
        flux.GUIDANCE: torch.tensor(3.5),
    }
    return DenoiseRequest(shape, flux.make_schedule(flow_scheduler(), steps, shape), (conditions,), rule=rule)


def make_row(steps: int, arrived: float, *, deadline: float | None = None, rule: DeepCache | None = None) -> DenoiseRow:
    job = Job(JobHost(lambda *_: None, lambda *_: None), "job", "image", deadline=deadline)
    if job.expires is not None:
        job.expires += arrived - job.arrived
    job.arrived = arrived
    row = DenoiseRow(job, make_request(steps, rule))
    row.size = 100
    return row


def test_the_short_pass_the_long_until_those_have_waited() -> None:
    cost = LaunchCost()
    cost.learn(100, 1000.0)  # a step takes a second
    first = make_row(20, 0.0)
    assert order(make_row(2, 1.0), cost) < order(first, cost)
    assert order(make_row(2, 30.0), cost) < order(first, cost)
    assert order(make_row(2, 37.0), cost) > order(first, cost), "it has waited long enough"


def test_a_deadline_counts_from_what_is_left_to_do() -> None:
    cost = LaunchCost()
    cost.learn(100, 1000.0)
    soon, late = make_row(5, 0.0, deadline=10.0), make_row(2, 0.0, deadline=10.0)
    assert order(soon, cost) < order(late, cost)
    assert order(late, cost) < order(make_row(20, 0.0), cost)
    assert order(make_row(20, 0.0, rule=DeepCache(interval=2)), cost) < order(make_row(20, 0.0), cost)


def test_a_short_request_does_not_wait_for_a_long_one_to_end() -> None:
    """Room for one row a launch: the short one joins at the next step, and the long one goes on afterwards."""
    requests = {"long": make_request(30), "short": make_request(3)}
    site = Site(Device(), SiteSettings(cache_bytes=1 << 18, superpage=1 << 14))
    stage = DenoiseStage("denoise", flux.FluxDenoiser(tiny_flux()), site, max_units=1)
    driver = Driver(Loop(site, {"flux": DenoiseProgram(stage, requests)}))
    driver.submit("long", "flux", "denoise", DenoiseWork(["long"]))
    driver.run(steps=6)
    driver.submit("short", "flux", "denoise", DenoiseWork(["short"]))
    driver.run(steps=8)
    done = [report for report in driver.reports["short"] if isinstance(report, Output) and report.kind == PROGRESS]
    assert len(done) == 3, "it ended while the long one runs"
    driver.finish()
    assert driver.error("long") is None
