"""Pictures to paint with a tiny FLUX, by diffusers' own pipeline alone and by our loop with others around; and whole
folders of diffusers behind a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from diffusers import AutoencoderKL, FluxPipeline

from polymux.core.batch.denoise import DenoiseStage
from polymux.core.batch.trajectory import DenoiseRequest
from polymux.core.cache.stepcache import StepRule
from polymux.core.compute.device import Device
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.models.files import ModelFiles
from polymux.core.pipeline import Pipeline
from polymux.core.service import Served, Service
from polymux.core.testing.denoising import CHANNELS, JOINT, POOLED, DenoiseProgram, flow_scheduler, tiny_flux
from polymux.core.testing.drive import Driver
from polymux.core.testing.engine import LocalEngine
from polymux.gateway.testing import open_gateway
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

    def request(self, rule: StepRule | None = None) -> DenoiseRequest:
        branches = []
        for kind in range(1 + self.negative):
            prompt, pooled = self.prompt(kind)
            branches.append({flux.PROMPT: prompt, flux.POOLED: pooled, flux.GUIDANCE: torch.tensor(self.guidance)})
        schedule = flux.make_schedule(flow_scheduler(), self.steps, self.shape)
        return DenoiseRequest(self.shape, schedule, tuple(branches), self.cfg, self.seed, rule)


PICTURES = {
    "a": Picture(seed=1, steps=8),
    "b": Picture(seed=2, steps=5, guidance=1.0),
    "c": Picture(seed=3, steps=12, guidance=7.0),
    "d": Picture(seed=4, steps=1),
    "cfg": Picture(seed=5, steps=6, negative=True),
    "wide": Picture(seed=6, steps=7, side=12),
    "wide cfg": Picture(seed=7, steps=4, side=12, negative=True, cfg=2.0),
    "long": Picture(seed=8, steps=6, text=9),
    "slow": Picture(seed=9, steps=28, guidance=2.0),
    "slow cfg": Picture(seed=10, steps=20, negative=True, cfg=1.5),
}


@dataclass
class Painted:
    """A picture as diffusers paints it alone: its latent, and per branch which steps ran the second block."""

    latent: torch.Tensor
    computed: list[list[bool]] = field(default_factory=list)


@pytest.fixture(scope="session")
def pictures() -> dict[str, Picture]:
    return PICTURES


@pytest.fixture(scope="session")
def paint() -> Callable[..., Painted]:
    """`paint(name, cache)`: diffusers' pipeline, from a seed, with one of its own step caches if asked."""
    with torch.device("meta"):
        vae = AutoencoderKL(latent_channels=CHANNELS, block_out_channels=(4, 4, 4, 4), norm_num_groups=1)
    pipeline = FluxPipeline(flow_scheduler(), vae, None, None, None, None, tiny_flux())
    pipeline.vae_scale_factor = 8
    pipeline.set_progress_bar_config(disable=True)
    done: dict[Any, Painted] = {}

    def run(name: str, cache: Any = None) -> Painted:
        if (name, repr(cache)) not in done:
            done[name, repr(cache)] = _paint(pipeline, PICTURES[name], cache)
        return done[name, repr(cache)]

    return run


def _paint(pipeline: FluxPipeline, picture: Picture, cache: Any) -> Painted:
    prompt, pooled = picture.prompt()
    options: dict[str, Any] = {}
    if picture.negative:
        negative, negative_pooled = picture.prompt(1)
        options = {
            "negative_prompt_embeds": negative[None],
            "negative_pooled_prompt_embeds": negative_pooled[None],
            "true_cfg_scale": picture.cfg,
        }
    calls: list[bool] = []
    model = pipeline.transformer
    before = model.register_forward_pre_hook(lambda *_: calls.append(False))
    inside = model.transformer_blocks[1].attn.register_forward_pre_hook(lambda *_: calls.__setitem__(-1, True))
    if cache is not None:
        model.enable_cache(cache)
    try:
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
    finally:
        before.remove()
        inside.remove()
        if cache is not None:
            model.disable_cache()
    branches = 1 + picture.negative
    latent = flux.unpack_latents(tokens, (picture.side // 2, picture.side // 2))[0]
    return Painted(latent, [calls[branch::branches] for branch in range(branches)])


@pytest.fixture(scope="session")
def drive() -> Callable[..., Driver]:
    """`drive(device, requests, **bounds)`: a driver of a loop that serves a table of requests as `flux`."""

    def make(device: Device, requests: dict[str, DenoiseRequest], **bounds: int) -> Driver:
        cache_bytes = bounds.pop("cache_bytes", 1 << 18)
        site = Site(device, SiteSettings(cache_bytes=cache_bytes, superpage=1 << 14))
        stage = DenoiseStage("denoise", flux.FluxDenoiser(tiny_flux()), site, **{"max_units": 10_000, **bounds})
        return Driver(Loop(site, {"flux": DenoiseProgram(stage, requests)}))

    return make


@dataclass(frozen=True)
class Behind:
    """What answers behind a gateway."""

    http: httpx.AsyncClient
    engine: LocalEngine

    @property
    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="none", max_retries=0, http_client=self.http)

    def check_integrity(self) -> None:
        """Of the loop, which must be idle."""
        assert self.engine.loop is not None
        self.engine.loop.check_integrity()  # type: ignore[attr-defined]


@asynccontextmanager
async def _open(pipeline: Pipeline, folders: Mapping[str, Path], **options: Any) -> AsyncIterator[Behind]:
    site = Site()
    files = {name: ModelFiles(name, folder) for name, folder in folders.items()}
    assert all(map(pipeline.accepts, files.values()))
    engine = LocalEngine({name: pipeline.load(each, site, options) for name, each in files.items()}, site)
    halves = [
        Served(name, tuple(pipeline.tasks), pipeline.front(each, options), engine) for name, each in files.items()
    ]
    async with open_gateway(Service(halves)) as http:
        behind = Behind(http, engine)
        yield behind
    behind.check_integrity()


@pytest.fixture(scope="session")
def serve() -> Callable[..., AbstractAsyncContextManager[Behind]]:
    """`async with serve(Painting(), {"flux": folder}) as behind:` folders behind a gateway, under these names."""
    return _open


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
