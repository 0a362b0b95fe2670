"""The denoise family over any scheduler: a row among others equals the row alone, and alone equals diffusers' loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
    UniPCMultistepScheduler,
)

from polymux.core.batch.denoise import DenoiseStage
from polymux.core.batch.denoiser import DenoiseBatch, DenoiseModel
from polymux.core.batch.trajectory import DenoiseRequest, DenoiseRow, Trajectory
from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.errors import InvalidRequest
from polymux.core.testing.denoising import DenoiseProgram, DenoiseWork, read_latents
from polymux.core.testing.drive import Driver

SHAPE = (3, 4, 6)

SCHEDULERS: dict[str, Callable[[], Any]] = {
    "flow": FlowMatchEulerDiscreteScheduler,
    "ddim": DDIMScheduler,
    "euler": EulerDiscreteScheduler,
    "euler ancestral": EulerAncestralDiscreteScheduler,
    "dpm++ 2m": DPMSolverMultistepScheduler,
    "unipc": UniPCMultistepScheduler,
    "heun": HeunDiscreteScheduler,
}
DEVICES = {"in step": Device, "launch-ahead": LaggedCpu}


class Sketch(DenoiseModel):
    """A small function of latent, timestep and condition; it remembers how many rows each pass had."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.mix = torch.randn(3, 3) / 3
        self.passes: list[int] = []
        self.failing = 0
        """Passes that still raise."""

    def forward(self, batch: DenoiseBatch) -> torch.Tensor:
        if self.failing:
            self.failing -= 1
            raise RuntimeError("the device was busy")
        self.passes.append(len(batch.latents))
        time = torch.cos(batch.timesteps / 300).view(-1, 1, 1, 1)
        return torch.tanh(torch.einsum("dc,pchw->pdhw", self.mix, batch.latents) + batch.gather("tone") * time)


def make_request(kind: str, steps: int, seed: int, *, branches: int = 1, scale: float = 3.0) -> DenoiseRequest:
    scheduler = SCHEDULERS[kind]()
    scheduler.set_timesteps(steps)
    generator = torch.Generator().manual_seed(seed + 99)
    conditions = tuple({"tone": torch.randn(SHAPE, generator=generator)} for _ in range(branches))
    return DenoiseRequest(SHAPE, scheduler, conditions, scale, seed)


def run_alone(kind: str, steps: int, request: DenoiseRequest) -> torch.Tensor:
    """The loop that diffusers' pipelines run, for one picture."""
    scheduler = SCHEDULERS[kind]()
    scheduler.set_timesteps(steps)
    generator = torch.Generator().manual_seed(request.seed)
    latents = torch.randn((1, *SHAPE), generator=generator) * getattr(scheduler, "init_noise_sigma", 1.0)
    options = {"generator": generator} if kind == "euler ancestral" else {}
    model = Sketch()
    for timestep in scheduler.timesteps:
        read = scheduler.scale_model_input(latents, timestep) if hasattr(scheduler, "scale_model_input") else latents
        clock = timestep.float().expand(1)
        predictions = [model.forward(DenoiseBatch(read, clock, [condition])) for condition in request.conditions]
        prediction = predictions[0]
        if len(predictions) == 2:
            prediction = predictions[1] + request.scale * (predictions[0] - predictions[1])
        latents = scheduler.step(prediction, timestep, latents, return_dict=False, **options)[0]
    return latents[0]


def drive(requests: dict[str, DenoiseRequest], device: Device | None = None, **bounds: int) -> tuple[Driver, Sketch]:
    site = Site(device or Device(), SiteSettings(cache_bytes=1 << 16, superpage=1 << 14))
    model = Sketch()
    stage = DenoiseStage("denoise", model, site, **{"max_units": 1000, **bounds})
    return Driver(Loop(site, {"sketch": DenoiseProgram(stage, requests)})), model


def submit(driver: Driver, *names: str) -> None:
    for name in names:
        driver.submit(name, "sketch", "denoise", DenoiseWork([name]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_keep_their_state_per_request(kind: str, device: str) -> None:
    """Rows with other step counts, seeds and branches, joining at other steps, equal diffusers' loop alone."""
    plans = {"a": (9, 1, 1), "b": (4, 2, 2), "c": (12, 3, 1), "d": (2, 4, 2), "e": (1, 5, 1)}
    requests = {name: make_request(kind, steps, seed, branches=n) for name, (steps, seed, n) in plans.items()}
    driver, model = drive(requests, DEVICES[device]())
    for name in plans:
        submit(driver, name)
        driver.run(steps=2)
    driver.finish()
    assert max(model.passes) > 2
    for name, (steps, _, _) in plans.items():
        expected = run_alone(kind, steps, requests[name])
        torch.testing.assert_close(read_latents(driver, name)[0], expected, atol=1e-5, rtol=1e-5)


def test_kinds_of_scheduler_share_a_pass() -> None:
    requests = {kind: make_request(kind, 6, seed) for seed, kind in enumerate(SCHEDULERS)}
    driver, model = drive(requests, LaggedCpu())
    submit(driver, *requests)
    driver.finish()
    assert model.passes[0] == len(SCHEDULERS)
    for kind, request in requests.items():
        torch.testing.assert_close(read_latents(driver, kind)[0], run_alone(kind, 6, request), atol=1e-5, rtol=1e-5)


def test_one_template_serves_many_rows() -> None:
    """Requests may name the same scheduler object: every row works on a copy."""
    first = make_request("unipc", 7, seed=0)
    requests = {str(seed): replace(first, seed=seed) for seed in range(4)}
    driver, _ = drive(requests)
    for name in requests:
        submit(driver, name)
        driver.run(steps=1)
    driver.finish()
    for name, request in requests.items():
        torch.testing.assert_close(read_latents(driver, name)[0], run_alone("unipc", 7, request), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_pass_that_fails_is_repeated_and_no_row_steps_twice(failing: int) -> None:
    """Four rows, then halves of two and single rows: whatever failed is run again with the same result."""
    requests = {str(seed): make_request("dpm++ 2m", 5, seed) for seed in range(4)}
    driver, model = drive(requests, LaggedCpu())
    submit(driver, *requests)
    driver.run(steps=2)
    model.failing = failing
    driver.finish()
    survivors = [name for name in requests if driver.error(name) is None]
    assert len(survivors) >= 3
    for name in survivors:
        expected = run_alone("dpm++ 2m", 5, requests[name])
        torch.testing.assert_close(read_latents(driver, name)[0], expected, atol=1e-5, rtol=1e-5)


def test_an_update_that_fails_changes_nothing() -> None:
    """A multistep scheduler that raises half-way is as it was before, so the step can be taken again."""
    request = make_request("unipc", 6, seed=3)
    trajectory, twin = Trajectory(request, torch.device("cpu")), Trajectory(request, torch.device("cpu"))
    for step in range(6):
        prediction = torch.full((1, *SHAPE), 0.1 * step)
        with pytest.raises(RuntimeError):
            trajectory.advance(torch.zeros(1, 5, 5, 5))
        trajectory.advance(prediction)
        twin.advance(prediction)
    assert torch.equal(trajectory.latents, twin.latents)


def test_a_launch_is_bounded_by_units_of_work() -> None:
    """A step of one branch is height x width units here; six rows of which two have two branches."""
    requests = {str(seed): make_request("flow", 3, seed, branches=1 + seed % 2) for seed in range(6)}
    driver, model = drive(requests, max_units=3 * 24)
    submit(driver, *requests)
    driver.finish()
    assert max(model.passes) <= 4, "a launch may go over its bound by what is left of one row, no more"
    assert sum(model.passes) == 3 * (3 + 6)


@pytest.mark.parametrize("device", DEVICES)
def test_groups_that_cannot_share_a_pass_take_turns(device: str) -> None:
    """A small picture is not held up until the large ones are done."""
    small = (3, 2, 2)
    requests = {name: make_request("flow", 12, seed) for seed, name in enumerate(["large", "larger"])}
    scheduler = SCHEDULERS["flow"]()
    scheduler.set_timesteps(4)
    requests["small"] = DenoiseRequest(small, scheduler, ({"tone": torch.ones(small)},))
    driver, _ = drive(requests, DEVICES[device]())
    submit(driver, "large", "larger", "small")
    while not read_latents(driver, "small"):
        assert driver.step()
    assert not read_latents(driver, "large")
    assert driver.steps <= 12
    driver.finish()


def test_rows_beyond_the_slots_wait() -> None:
    requests = {str(seed): make_request("ddim", 3, seed) for seed in range(5)}
    driver, model = drive(requests, max_rows=2)
    submit(driver, *requests)
    driver.finish()
    assert max(model.passes) == 2
    assert all(read_latents(driver, name) for name in requests)


def test_a_schedule_without_steps_is_refused() -> None:
    request = make_request("flow", 1, 0)
    empty = SCHEDULERS["flow"]()
    empty.timesteps = torch.zeros(0)
    with pytest.raises(InvalidRequest, match="at least one denoising step"):
        DenoiseRow(None, replace(request, scheduler=empty))  # type: ignore[arg-type]
