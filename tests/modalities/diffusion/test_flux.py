"""FLUX rows at different timesteps in one pass, each equal to diffusers' own pipeline running it alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polymux.core.batch.denoise import PROGRESS
from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.errors import InvalidRequest
from polymux.core.tasks import Progress
from polymux.core.testing.denoising import CHANNELS, DenoiseWork, flow_scheduler, read_latents
from polymux.modalities.diffusion import flux

NAMES = ["a", "b", "c", "d", "cfg", "wide", "wide cfg", "long"]
DEVICES = {"in step": Device, "launch-ahead": LaggedCpu}


def assert_same(latent: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(latent, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def requests(pictures):
    return {name: pictures[name].request() for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_row_alone_equals_the_pipeline(name, requests, drive, paint) -> None:
    driver = drive(Device(), requests)
    driver.submit("job", "flux", "denoise", DenoiseWork([name]))
    driver.finish()
    assert_same(read_latents(driver, "job")[0], paint(name).latent)
    assert driver.receipt("job").steps_run == len(requests[name].scheduler.timesteps)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_joining_and_leaving_at_any_step_equal_the_pipeline(device, requests, drive, paint) -> None:
    """Different step counts, guidance, seeds, branches, resolutions, text lengths and arrivals: same pictures."""
    driver = drive(DEVICES[device](), requests)
    for name in NAMES:
        driver.submit(name, "flux", "denoise", DenoiseWork([name]))
        driver.run(steps=2)
    driver.finish()
    for name in NAMES:
        assert_same(read_latents(driver, name)[0], paint(name).latent)
    steps = sum(len(request.scheduler.timesteps) for request in requests.values())
    assert driver.loop.launches < steps, "nothing was batched"


@pytest.mark.parametrize("device", DEVICES)
def test_every_step_is_reported_in_order(device, requests, pictures, drive) -> None:
    driver = drive(DEVICES[device](), requests)
    driver.submit("job", "flux", "denoise", DenoiseWork(["a", "b"]))
    driver.finish()
    progress = driver.outputs("job", PROGRESS, Progress)
    for index, name in enumerate(["a", "b"]):
        steps = pictures[name].steps
        assert [report.step for report in progress if report.index == index] == list(range(1, steps + 1))
        assert all(report.steps == steps for report in progress if report.index == index)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_cancelled_row_frees_its_slot_and_leaves_the_others_alone(device, after, requests, drive, paint) -> None:
    driver = drive(DEVICES[device](), requests, max_rows=2)
    for name in ("c", "a", "cfg"):
        driver.submit(name, "flux", "denoise", DenoiseWork([name]))
    driver.run(steps=after)
    driver.cancel("c")
    driver.finish()  # proves that nothing is held
    assert not read_latents(driver, "c")
    for name in ("a", "cfg"):
        assert_same(read_latents(driver, name)[0], paint(name).latent)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_that_is_not_finite_fails_alone(device, requests, drive, paint) -> None:
    poison = {name: value.clone() for name, value in requests["b"].conditions[0].items()}
    poison[flux.PROMPT][2, 3] = float("nan")
    requests["b"] = replace(requests["b"], conditions=(poison,))
    driver = drive(DEVICES[device](), requests)
    for name in ("a", "b", "c"):
        driver.submit(name, "flux", "denoise", DenoiseWork([name]))
    driver.finish()
    assert "not finite" in driver.error("b").message
    for name in ("a", "c"):
        assert_same(read_latents(driver, name)[0], paint(name).latent)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_whose_pass_raises_fails_alone(device, requests, drive, paint) -> None:
    """The pass is halved until the guilty row is alone; no mate takes a step twice."""
    conditions = {**requests["b"].conditions[0], flux.GUIDANCE: torch.ones((), device="meta")}
    requests["b"] = replace(requests["b"], conditions=(conditions,))
    driver = drive(DEVICES[device](), requests)
    driver.submit("job", "flux", "denoise", DenoiseWork(["a", "c"]))
    driver.submit("b", "flux", "denoise", DenoiseWork(["b"]))
    driver.finish()
    assert driver.error("b") is not None
    for latent, name in zip(read_latents(driver, "job"), ("a", "c")):
        assert_same(latent, paint(name).latent)


def test_picture_k_of_n_is_the_one_of_seed_plus_k(requests, drive, paint) -> None:
    first = replace(requests["a"], seed=0)
    driver = drive(LaggedCpu(), {str(k): replace(first, seed=first.seed + k) for k in range(4)})
    driver.submit("n", "flux", "denoise", DenoiseWork([str(k) for k in range(4)]))
    driver.finish()
    assert_same(read_latents(driver, "n")[1], paint("a").latent)


def test_packing_a_latent_into_tokens_is_undone_by_unpacking() -> None:
    latents = torch.randn(2, CHANNELS, 6, 10)
    assert torch.equal(flux.unpack_latents(flux.pack_latents(latents), (3, 5)), latents)


def test_a_latent_that_does_not_divide_into_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="multiples of 16"):
        flux.make_schedule(flow_scheduler(), 4, (CHANNELS, 7, 8))
