"""FLUX rows at different timesteps in one pass, each equal to diffusers' own pipeline running it alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from diffusers import AutoencoderKL, FluxPipeline

from polymux.core.batch.denoise import PROGRESS, DenoiseStage
from polymux.core.batch.trajectory import DenoiseRequest
from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.errors import InvalidRequest
from polymux.core.tasks import Progress
from polymux.core.testing.denoising import (
    CHANNELS,
    JOINT,
    POOLED,
    DenoiseProgram,
    DenoiseWork,
    flow_scheduler,
    read_latents,
    tiny_flux,
)
from polymux.core.testing.drive import Driver
from polymux.modalities.diffusion import flux


@dataclass(frozen=True)
class Picture:
    """What a user asks for, before it is a request to the engine."""

    seed: int
    steps: int
    guidance: float = 3.5
    side: int = 8
    """Of the latent: the picture is 8 times as large."""
    text: int = 5
    negative: bool = False
    cfg: float = 4.0

    @property
    def shape(self) -> tuple[int, int, int]:
        return (CHANNELS, self.side, self.side)

    def prompt(self, kind: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + kind)
        return torch.randn(self.text, JOINT, generator=generator), torch.randn(POOLED, generator=generator)

    def request(self) -> DenoiseRequest:
        branches = []
        for kind in range(1 + self.negative):
            prompt, pooled = self.prompt(kind)
            branches.append({flux.PROMPT: prompt, flux.POOLED: pooled, flux.GUIDANCE: torch.tensor(self.guidance)})
        schedule = flux.make_schedule(flow_scheduler(), self.steps, self.shape)
        return DenoiseRequest(self.shape, schedule, tuple(branches), self.cfg, self.seed)


PICTURES = {
    "a": Picture(seed=1, steps=8),
    "b": Picture(seed=2, steps=5, guidance=1.0),
    "c": Picture(seed=3, steps=12, guidance=7.0),
    "d": Picture(seed=4, steps=1),
    "cfg": Picture(seed=5, steps=6, negative=True),
    "wide": Picture(seed=6, steps=7, side=12),
    "wide cfg": Picture(seed=7, steps=4, side=12, negative=True, cfg=2.0),
    "long": Picture(seed=8, steps=6, text=9),
}
DEVICES = {"in step": Device, "launch-ahead": LaggedCpu}


@pytest.fixture(scope="module")
def solo() -> dict[str, torch.Tensor]:
    """Every picture from diffusers' pipeline alone, from a seed, as a latent."""
    with torch.device("meta"):
        vae = AutoencoderKL(latent_channels=CHANNELS, block_out_channels=(4, 4, 4, 4), norm_num_groups=1)
    pipeline = FluxPipeline(flow_scheduler(), vae, None, None, None, None, tiny_flux())
    pipeline.vae_scale_factor = 8
    pipeline.set_progress_bar_config(disable=True)
    results = {}
    for name, picture in PICTURES.items():
        prompt, pooled = picture.prompt()
        options = {}
        if picture.negative:
            negative, negative_pooled = picture.prompt(1)
            options = {
                "negative_prompt_embeds": negative[None],
                "negative_pooled_prompt_embeds": negative_pooled[None],
                "true_cfg_scale": picture.cfg,
            }
        tokens = pipeline(
            prompt_embeds=prompt[None],
            pooled_prompt_embeds=pooled[None],
            height=picture.side * 8,
            width=picture.side * 8,
            num_inference_steps=picture.steps,
            guidance_scale=picture.guidance,
            generator=torch.Generator().manual_seed(picture.seed),
            output_type="latent",
            return_dict=False,
            **options,
        )[0]
        results[name] = flux.unpack_latents(tokens, (picture.side // 2, picture.side // 2))[0]
    return results


def drive(device: Device, requests: dict[str, DenoiseRequest] | None = None, **bounds: int) -> Driver:
    site = Site(device, SiteSettings(cache_bytes=1 << 16, superpage=1 << 14))
    stage = DenoiseStage("denoise", flux.FluxDenoiser(tiny_flux()), site, **{"max_units": 10_000, **bounds})
    requests = requests or {name: picture.request() for name, picture in PICTURES.items()}
    return Driver(Loop(site, {"flux": DenoiseProgram(stage, requests)}))


@pytest.mark.parametrize("name", PICTURES)
def test_a_row_alone_equals_the_pipeline(name: str, solo: dict[str, torch.Tensor]) -> None:
    driver = drive(Device())
    driver.submit("job", "flux", "denoise", DenoiseWork([name]))
    driver.finish()
    torch.testing.assert_close(read_latents(driver, "job")[0], solo[name], atol=1e-5, rtol=1e-5)
    assert driver.receipt("job").steps_run == PICTURES[name].steps


@pytest.mark.parametrize("device", DEVICES)
def test_rows_joining_and_leaving_at_any_step_equal_the_pipeline(device: str, solo: dict[str, torch.Tensor]) -> None:
    """Different step counts, guidance, seeds, branches, resolutions, text lengths and arrivals: same pictures."""
    driver = drive(DEVICES[device]())
    for name in PICTURES:
        driver.submit(name, "flux", "denoise", DenoiseWork([name]))
        driver.run(steps=2)
    driver.finish()
    for name, expected in solo.items():
        torch.testing.assert_close(read_latents(driver, name)[0], expected, atol=1e-5, rtol=1e-5)
    passes = sum(picture.steps for picture in PICTURES.values())
    assert driver.loop.launches < passes, "nothing was batched"


@pytest.mark.parametrize("device", DEVICES)
def test_every_step_is_reported_in_order(device: str) -> None:
    driver = drive(DEVICES[device]())
    driver.submit("job", "flux", "denoise", DenoiseWork(["a", "b"]))
    driver.finish()
    progress = driver.outputs("job", PROGRESS, Progress)
    for index, name in enumerate(["a", "b"]):
        steps = PICTURES[name].steps
        assert [report.step for report in progress if report.index == index] == list(range(1, steps + 1))
        assert all(report.steps == steps for report in progress if report.index == index)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_cancelled_row_frees_its_slot_and_leaves_the_others_alone(
    device: str, after: int, solo: dict[str, torch.Tensor]
) -> None:
    driver = drive(DEVICES[device](), max_rows=2)
    for name in ("c", "a", "cfg"):
        driver.submit(name, "flux", "denoise", DenoiseWork([name]))
    driver.run(steps=after)
    driver.cancel("c")
    driver.finish()  # proves that nothing is held
    assert not read_latents(driver, "c")
    for name in ("a", "cfg"):
        torch.testing.assert_close(read_latents(driver, name)[0], solo[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_that_is_not_finite_fails_alone(device: str, solo: dict[str, torch.Tensor]) -> None:
    requests = {name: PICTURES[name].request() for name in ("a", "b", "c")}
    poison = {name: value.clone() for name, value in requests["b"].conditions[0].items()}
    poison[flux.PROMPT][2, 3] = float("nan")
    requests["b"] = replace(requests["b"], conditions=(poison,))
    driver = drive(DEVICES[device](), requests)
    for name in requests:
        driver.submit(name, "flux", "denoise", DenoiseWork([name]))
    driver.finish()
    assert "not finite" in driver.error("b").message
    for name in ("a", "c"):
        torch.testing.assert_close(read_latents(driver, name)[0], solo[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_whose_pass_raises_fails_alone(device: str, solo: dict[str, torch.Tensor]) -> None:
    """The pass is halved until the guilty row is alone; no mate takes a step twice."""
    requests = {name: PICTURES[name].request() for name in ("a", "b", "c")}
    requests["b"] = replace(requests["b"], conditions=({**requests["b"].conditions[0], flux.POOLED: torch.zeros(3)},))
    driver = drive(DEVICES[device](), requests)
    driver.submit("job", "flux", "denoise", DenoiseWork(["a", "c"]))
    driver.submit("b", "flux", "denoise", DenoiseWork(["b"]))
    driver.finish()
    assert driver.error("b") is not None
    for latent, name in zip(read_latents(driver, "job"), ("a", "c")):
        torch.testing.assert_close(latent, solo[name], atol=1e-5, rtol=1e-5)


def test_picture_k_of_n_is_the_one_of_seed_plus_k(solo: dict[str, torch.Tensor]) -> None:
    first = replace(PICTURES["a"].request(), seed=0)
    requests = {str(k): replace(first, seed=first.seed + k) for k in range(4)}
    driver = drive(LaggedCpu(), requests)
    driver.submit("n", "flux", "denoise", DenoiseWork(list(requests)))
    driver.finish()
    torch.testing.assert_close(read_latents(driver, "n")[1], solo["a"], atol=1e-5, rtol=1e-5)


def test_packing_a_latent_into_tokens_is_undone_by_unpacking() -> None:
    latents = torch.randn(2, CHANNELS, 6, 10)
    assert torch.equal(flux.unpack_latents(flux.pack_latents(latents), (3, 5)), latents)


def test_a_latent_that_does_not_divide_into_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="multiples of 16"):
        flux.make_schedule(flow_scheduler(), 4, (CHANNELS, 7, 8))
