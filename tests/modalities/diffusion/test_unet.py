"""Stable Diffusion's UNets: rows at different timesteps, with guidance, each equal to diffusers' pipeline alone."""

from __future__ import annotations

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    UniPCMultistepScheduler,
)

from polymux.core.batch.denoise import DenoiseStage
from polymux.core.batch.trajectory import DenoiseRequest
from polymux.core.cache.stepcache import DeepCache, StepRule
from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.testing.denoising import DenoiseProgram, DenoiseWork, read_latents
from polymux.core.testing.drive import Driver
from polymux.modalities.diffusion import encoders, unet

SIDE, TEXT, DIM, POOLED = 8, 5, 16, 12
KINDS = {
    "ddim": lambda: DDIMScheduler(steps_offset=1, clip_sample=False),  # what the pipeline makes of every DDIM
    "euler": EulerDiscreteScheduler,
    "dpm++ 2m": DPMSolverMultistepScheduler,
    "unipc": UniPCMultistepScheduler,
}
PICTURES = {"a": (6, 1, 5.0), "b": (3, 2, 7.5), "c": (9, 3, 2.0), "d": (4, 4, 0.0)}
"""Steps, seed, guidance scale; 0: none, one branch."""
DEVICES = {"in step": Device, "launch-ahead": LaggedCpu}


def make_unet(extended: bool) -> UNet2DConditionModel:
    torch.manual_seed(0)
    options = {}
    if extended:
        options = {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 4,
            "projection_class_embeddings_input_dim": POOLED + 6 * 4,
        }
    return UNet2DConditionModel(
        sample_size=SIDE,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=DIM,
        attention_head_dim=4,
        **options,
    ).eval()


def make_prompt(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TEXT, DIM, generator=generator), torch.randn(POOLED, generator=generator)


def make_request(kind: str, name: str, extended: bool, rule: StepRule | None = None) -> DenoiseRequest:
    steps, seed, scale = PICTURES[name]
    scheduler = KINDS[kind]()
    scheduler.set_timesteps(steps)
    branches = []
    for number in range(2 if scale else 1):
        prompt, pooled = make_prompt(10 * seed + number)
        condition = {encoders.PROMPT: prompt}
        if extended:
            sizes = torch.tensor([SIDE * 8.0, SIDE * 8.0, 0.0, 0.0, SIDE * 8.0, SIDE * 8.0])
            condition |= {encoders.POOLED: pooled, unet.SIZES: sizes}
        branches.append(condition)
    return DenoiseRequest((4, SIDE, SIDE), scheduler, tuple(branches), scale, seed, rule)


def reuse_depths(model: UNet2DConditionModel, rule: StepRule, steps: int) -> None:
    """DeepCache by hand: in a step that is skipped, what comes up to the last layer is what came up before."""
    plan, kept, taken = rule.plan(steps), [], []
    assert plan is not None
    layer = model.up_blocks[-1].resnets[-1]
    deep = layer.in_channels - model.config.block_out_channels[0]

    def replace(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        joined, *rest = arguments
        if plan[len(taken)]:
            kept[:] = [joined[:, :deep]]
        taken.append(None)
        return torch.cat([kept[0], joined[:, deep:]], 1), *rest

    layer.register_forward_pre_hook(replace)


def paint(kind: str, name: str, extended: bool, rule: StepRule | None = None) -> torch.Tensor:
    steps, seed, scale = PICTURES[name]
    model = make_unet(extended)
    if rule is not None:
        reuse_depths(model, rule, steps)
    vae = AutoencoderKL(block_out_channels=(4, 4, 4, 4), norm_num_groups=1)
    if extended:
        pipeline = StableDiffusionXLPipeline(vae, None, None, None, None, model, KINDS[kind](), add_watermarker=False)
    else:
        pipeline = StableDiffusionPipeline(
            vae, None, None, model, KINDS[kind](), None, None, requires_safety_checker=False
        )
    pipeline.set_progress_bar_config(disable=True)
    (prompt, pooled), (negative, negative_pooled) = make_prompt(10 * seed), make_prompt(10 * seed + 1)
    options = {"pooled_prompt_embeds": pooled[None], "negative_pooled_prompt_embeds": negative_pooled[None]}
    return pipeline(
        prompt_embeds=prompt[None],
        negative_prompt_embeds=negative[None],
        height=SIDE * 8,
        width=SIDE * 8,
        num_inference_steps=steps,
        guidance_scale=scale,
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
        return_dict=False,
        **(options if extended else {}),
    )[0][0]


def run_all(device: str, kind: str, extended: bool, rule: StepRule | None = None) -> Driver:
    """Every picture, joining two steps apart."""
    site = Site(DEVICES[device](), SiteSettings(cache_bytes=1 << 18, superpage=1 << 14))
    stage = DenoiseStage("denoise", unet.UNetDenoiser(make_unet(extended)), site, max_units=10_000)
    requests = {name: make_request(kind, name, extended, rule) for name in PICTURES}
    driver = Driver(Loop(site, {"unet": DenoiseProgram(stage, requests)}))
    for name in PICTURES:
        driver.submit(name, "unet", "denoise", DenoiseWork([name]))
        driver.run(steps=2)
    driver.finish()
    return driver


def assert_same(latent: torch.Tensor, expected: torch.Tensor) -> None:
    # random weights blow the latent up to hundreds: a millionth of that is rounding
    torch.testing.assert_close(latent, expected, atol=5e-6 * expected.abs().max().item(), rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "extended"), [*((kind, False) for kind in KINDS), ("euler", True), ("ddim", True)])
def test_rows_in_a_mixed_batch_equal_the_pipeline_alone(kind: str, extended: bool, device: str) -> None:
    driver = run_all(device, kind, extended)
    for name in PICTURES:
        assert_same(read_latents(driver, name)[0], paint(kind, name, extended))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interval", [2, 3])
def test_depths_are_reused_as_by_hand_alone(interval: int, device: str) -> None:
    """DeepCache in a mixed batch: the pipeline alone, with the depths of the planned steps put in the others' place."""
    rule = DeepCache(interval=interval)
    driver = run_all(device, "ddim", False, rule)
    for name, (steps, _, _) in PICTURES.items():
        assert_same(read_latents(driver, name)[0], paint("ddim", name, False, rule))
        assert driver.receipt(name).steps_skipped == rule.plan(steps).count(False)
    assert (read_latents(driver, "c")[0] - paint("ddim", "c", False)).abs().max() > 1e-3, "it must matter"
