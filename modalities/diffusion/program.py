"""The engine half of painting: texts are encoded once, each picture is denoised by steps and decoded at its end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from polymux.core.batch.adapters import AdapterStage
from polymux.core.batch.denoise import DenoiseStage
from polymux.core.batch.denoiser import keep_layer
from polymux.core.batch.oneshot import OneShotRow, OneShotStage
from polymux.core.batch.trajectory import DenoiseRequest, DenoiseRow, Origin
from polymux.core.cache.holding import Holding
from polymux.core.compute.dtype import read_dtype
from polymux.core.engine.job import Job
from polymux.core.engine.site import Site
from polymux.core.errors import InternalError, InvalidRequest
from polymux.core.pipeline import Program
from polymux.modalities.diffusion.adapted import PassAdapters, load_adapters
from polymux.modalities.diffusion.families import Family, Parts, load_family
from polymux.modalities.diffusion.pixels import LatentSketch, StartEncoder
from polymux.modalities.diffusion.presets import Presets
from polymux.modalities.diffusion.recipes import find_recipe
from polymux.modalities.diffusion.schedules import make_schedule, skip_steps
from polymux.modalities.diffusion.tuning import tune
from polymux.modalities.diffusion.work import PICTURE, Painted, PaintWork, Prompt, Source, Text

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

KEPT_PROMPTS = 32
"""Encoded texts that stay on the device: 4 MiB each at FLUX's size."""

KNEE = 8192
"""Tokens of one launch; more keep no device busier."""


@dataclass(frozen=True)
class Adapter:
    """One that a job holds."""

    holding: Holding
    weights: Tensor
    """(size,), in the arena."""
    digest: bytes


class PaintProgram(Program):
    """Serves the task `image`, or `video`. All pictures of a request share its texts, and pass through the stages
    together."""

    def __init__(
        self, task: str, family: Family, presets: Presets, site: Site, adapters: PassAdapters | None = None
    ) -> None:
        self.work = {task: PaintWork}
        self.family = family
        self.presets = presets
        sketch = LatentSketch(family.decoder, family.channels)
        self.encoder = OneShotStage("encode", family.texts, site, max_units=KNEE)
        self.reader = OneShotStage("read", family.source, site, max_units=1, max_rows=1)
        self.denoiser = DenoiseStage("denoise", family.denoiser, site, max_units=KNEE, sketch=sketch)
        self.decoder = OneShotStage("decode", family.decoder, site, max_units=1, max_rows=1, to_host=True)
        self.adapters = AdapterStage(adapters, site) if adapters is not None else None
        stages = (self.encoder, self.reader, self.denoiser, self.decoder, self.adapters)
        self.stages = tuple(stage for stage in stages if stage is not None)
        self._device = site.device.torch
        self._texts: OrderedDict[tuple[Prompt, bytes], Mapping[str, Tensor]] = OrderedDict()

    async def run(self, job: Job, work: msgspec.Struct) -> None:
        if not isinstance(work, PaintWork):
            raise InvalidRequest("malformed image work")
        family = self.family
        shape = family.shape(work)
        extra = dict(family.extra(work, self._device))
        adapter = await self._adapt(job, work.adapter)
        start, origin = 0, None
        if work.source is not None:
            read = await self._read(job, work, work.source)
            if isinstance(read, Origin):
                start, origin = skip_steps(work.steps, work.source.strength), read
            else:
                extra |= read
        texts = [work.prompt] if work.negative is None else [work.prompt, work.negative]
        branches = tuple([{**await self._encode(job, text, adapter), **extra} for text in texts])
        schedule = make_schedule(family.scheduler, work.steps, family.tokens(shape), linear=family.linear)
        steps = len(schedule.timesteps) - start
        requests = [
            DenoiseRequest(
                shape,
                schedule,
                branches,
                work.scale,
                work.seed + index,
                self.presets.find(work.quality, steps),
                start,
                origin,
                space_out(work.previews, steps),
                work.strict,
                None if adapter is None else adapter.weights,
            )
            for index in range(work.n)
        ]
        pictures = [
            job.spawn(self._paint(job, request, index, work, adapter)) for index, request in enumerate(requests)
        ]
        for picture in pictures:
            await picture

    async def _adapt(self, job: Job, name: str | None) -> Adapter | None:
        if name is None:
            return None
        if self.adapters is None:
            raise InternalError("this model was loaded without adapters")
        holding = await self.adapters.fetch(job, name)
        return Adapter(holding, self.adapters.view[holding.blocks[0]], self.adapters.digest(name))

    async def _encode(self, job: Job, text: Prompt, adapter: Adapter | None) -> Mapping[str, Tensor]:
        job.receipt.input_units += text.size
        key = (text, b"" if adapter is None else adapter.digest)
        if key in self._texts:
            job.receipt.encoder_hits += 1
            job.receipt.cached_units += text.size
            self._texts.move_to_end(key)
            return self._texts[key]
        row = OneShotRow(job, Text(text, None if adapter is None else adapter.weights), text.size)
        if adapter is not None:
            row.reads = [adapter.holding]
        encoded: Mapping[str, Tensor] = (await job.start(self.encoder, row)).result
        self._texts[key] = encoded
        if len(self._texts) > KEPT_PROMPTS:
            self._texts.popitem(last=False)
        return encoded

    async def _read(self, job: Job, work: PaintWork, source: Source) -> Origin | Mapping[str, Tensor]:
        """What stands for the picture to start from: an origin to be noised, or further conditions."""
        if isinstance(self.family.source, StartEncoder):
            row = await job.start(self.reader, OneShotRow(job, (source.pixels, work.frames), 1))
            conditions: Mapping[str, Tensor] = row.result
            return conditions
        row = await job.start(self.reader, OneShotRow(job, source.pixels, 1))
        mask = None
        if source.mask is not None:
            sides = (work.height // self.family.scale, work.width // self.family.scale)
            whole = torch.from_numpy(source.mask).to(self._device).float()[None, None]
            mask = torch.nn.functional.interpolate(whole, size=sides)[0]
        return Origin(row.result.mean, row.result.deviation, mask)

    async def _paint(
        self, job: Job, request: DenoiseRequest, index: int, work: PaintWork, adapter: Adapter | None
    ) -> None:
        row = DenoiseRow(job, request, index)
        if adapter is not None:
            row.reads = [adapter.holding]
        await job.start(self.denoiser, row)
        if row.result is None:
            raise InternalError("a picture ended without its latent")
        decoded = await job.start(self.decoder, OneShotRow(job, row.result, 1, index))
        job.receipt.output_units += self.family.tokens(request.shape) * (request.shape[1] if self.family.apart else 1)
        pixels = decoded.result.numpy()
        if work.source is not None and work.source.mask is not None:
            pixels = np.where(work.source.mask[..., None] > 0, pixels, work.source.pixels)
        job.emit(PICTURE, Painted(index, request.seed, pixels))


def space_out(count: int, steps: int) -> tuple[int, ...]:
    """Step counts after which `count` previews are due, evenly apart, before the last step."""
    places = {round(steps * number / (count + 1)) for number in range(1, count + 1)}
    return tuple(sorted(place for place in places if 0 < place < steps))


def load_painter(files: ModelFiles, site: Site, options: Mapping[str, Any]) -> PaintProgram:
    """Raises `ModelError` when the folder lacks a part."""
    find = find_recipe(files)
    if find is None:
        raise InternalError("a folder without a recipe was accepted")
    recipe = find(files)
    parts = Parts(files, read_dtype(options), site.device.torch)
    family = load_family(recipe.kind, parts)
    adapters = load_adapters(options, str(parts.index["_class_name"]), parts.adaptable(), parts.dtype)
    tune(family.denoiser, site.device.torch, options, keep_layer if adapters is None else adapters.wrap)
    if adapters is not None:
        adapters.replace(adapters.model)
        family.denoiser.adapters = family.texts.adapters = adapters
    presets = Presets.load(files, options, family.denoiser, site.step_rule(options))
    task = "image" if recipe.frames is None else "video"
    return PaintProgram(task, family, presets, site, adapters)
