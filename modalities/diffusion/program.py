"""The engine half of painting: texts are encoded once, each picture is denoised by steps and decoded at its end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from torch import Tensor
from transformers import CLIPTextModel, T5EncoderModel

from polymux.core.batch.denoise import DenoiseStage
from polymux.core.batch.oneshot import OneShotRow, OneShotStage
from polymux.core.batch.trajectory import DenoiseRequest, DenoiseRow
from polymux.core.cache.stepcache import StepRule
from polymux.core.compute.dtype import read_dtype
from polymux.core.engine.job import Job
from polymux.core.engine.site import Site
from polymux.core.errors import InternalError, InvalidRequest
from polymux.core.pipeline import Program
from polymux.modalities.diffusion.flux import GUIDANCE, FluxDenoiser, make_schedule
from polymux.modalities.diffusion.parts import LatentDecoder, TextEncoders
from polymux.modalities.diffusion.work import PICTURE, Painted, PaintWork, Prompt

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

KEPT_PROMPTS = 32
"""Encoded texts that stay on the device: 4 MiB each at FLUX's size."""

KNEE = 8192
"""Tokens of one launch; more keep no device busier."""


class PaintProgram(Program):
    """Serves the task `image`. All pictures of a request share its texts, and pass through the stages together."""

    def __init__(
        self,
        encoder: OneShotStage,
        denoiser: DenoiseStage,
        decoder: OneShotStage,
        scheduler: FlowMatchEulerDiscreteScheduler,
        latent: tuple[int, int],
        device: torch.device,
        rule: StepRule | None = None,
    ) -> None:
        """`latent`: channels, and pixels along the side of one latent pixel. `rule`: which steps are skipped."""
        self.work = {"image": PaintWork}
        self.encoder = encoder
        self.denoiser = denoiser
        self.decoder = decoder
        self.stages = (encoder, denoiser, decoder)
        self._scheduler = scheduler
        self._latent = latent
        self._device = device
        self._rule = rule
        self._texts: OrderedDict[Prompt, Mapping[str, Tensor]] = OrderedDict()

    async def run(self, job: Job, work: msgspec.Struct) -> None:
        if not isinstance(work, PaintWork):
            raise InvalidRequest("malformed image work")
        channels, scale = self._latent
        shape = (channels, work.height // scale, work.width // scale)
        schedule = make_schedule(self._scheduler, work.steps, shape)
        guidance = torch.tensor(work.guidance, dtype=torch.float32).to(self._device)
        texts = [work.prompt] if work.negative is None else [work.prompt, work.negative]
        branches = tuple([{**await self._encode(job, text), GUIDANCE: guidance} for text in texts])
        requests = [
            DenoiseRequest(shape, schedule, branches, work.true_scale, work.seed + index, self._rule)
            for index in range(work.n)
        ]
        pictures = [job.spawn(self._paint(job, request, index)) for index, request in enumerate(requests)]
        for picture in pictures:
            await picture

    async def _encode(self, job: Job, text: Prompt) -> Mapping[str, Tensor]:
        job.receipt.input_units += len(text.tokens)
        if text in self._texts:
            job.receipt.encoder_hits += 1
            job.receipt.cached_units += len(text.tokens)
            self._texts.move_to_end(text)
            return self._texts[text]
        row = await job.start(self.encoder, OneShotRow(job, text, len(text.tokens)))
        encoded: Mapping[str, Tensor] = row.result
        self._texts[text] = encoded
        if len(self._texts) > KEPT_PROMPTS:
            self._texts.popitem(last=False)
        return encoded

    async def _paint(self, job: Job, request: DenoiseRequest, index: int) -> None:
        row = await job.start(self.denoiser, DenoiseRow(job, request, index))
        if row.result is None:
            raise InternalError("a picture ended without its latent")
        decoded = await job.start(self.decoder, OneShotRow(job, row.result, 1, index))
        _, height, width = request.shape
        job.receipt.output_units += (height // 2) * (width // 2)
        job.emit(PICTURE, Painted(index, request.seed, decoded.result.numpy()))


def load_flux(files: ModelFiles, site: Site, options: Mapping[str, Any]) -> PaintProgram:
    dtype, device = read_dtype(options), site.device.torch
    place: Any = {"torch_dtype": dtype, "use_safetensors": True}

    def load(kind: Any, name: str) -> Any:
        return kind.from_pretrained(files.path(name), **place).to(device).eval().requires_grad_(False)

    vae = load(AutoencoderKL, "vae")
    texts = TextEncoders(load(CLIPTextModel, "text_encoder"), load(T5EncoderModel, "text_encoder_2"))
    denoiser = FluxDenoiser(load(FluxTransformer2DModel, "transformer"))
    return PaintProgram(
        OneShotStage("encode", texts, site, max_units=KNEE),
        DenoiseStage("denoise", denoiser, site, max_units=KNEE),
        OneShotStage("decode", LatentDecoder(vae), site, max_units=1, max_rows=1, to_host=True),
        FlowMatchEulerDiscreteScheduler.from_pretrained(files.path("scheduler")),
        (vae.config.latent_channels, 2 ** (len(vae.config.block_out_channels) - 1)),
        device,
        site.step_rule(options),
    )
