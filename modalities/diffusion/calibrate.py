"""`polymux calibrate`: how much a model's residuals change from step to step, measured once for its checkpoint.

MagCache skips by these ratios, so its schedule is known before a request starts, and nothing is measured while serving.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from polymux.core.batch.oneshot import OneShotRow
from polymux.core.batch.trajectory import DenoiseRequest, DenoiseRow
from polymux.core.cache.stepcache import MagProbe
from polymux.core.engine.job import Job
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site
from polymux.core.engine.wire import pack
from polymux.core.errors import ModelError, PolymuxError
from polymux.core.tasks import Film, Paint
from polymux.core.vocabulary import Failed, Submit
from polymux.modalities.diffusion.front import PaintFront
from polymux.modalities.diffusion.presets import Presets
from polymux.modalities.diffusion.program import Adapter, PaintProgram, load_painter
from polymux.modalities.diffusion.unet import UNetDenoiser
from polymux.modalities.diffusion.work import PaintWork

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

PROMPTS = (
    "a red bicycle leaning on a white wall, morning light",
    "portrait of an old fisherman with a grey beard",
    "a city at night in the rain, neon signs, reflections",
    "a bowl of ramen on a wooden table, seen from above",
)


class ProbingProgram(PaintProgram):
    """Denoises every request in full, and keeps what its probes measured."""

    ratios: list[torch.Tensor]

    async def _paint(
        self, job: Job, request: DenoiseRequest, index: int, work: PaintWork, adapter: Adapter | None
    ) -> None:
        row = await job.start(self.denoiser, DenoiseRow(job, request, index))
        self.ratios += row.ratios
        if row.result is not None:  # a model that gives nothing that can be shown is not to be calibrated
            await job.start(self.decoder, OneShotRow(job, row.result, 1, index))


def calibrate(
    files: ModelFiles, site: Site, options: dict[str, Any], prompts: Sequence[str], **asked: int | None
) -> list[float]:
    """Per step, the mean ratio over all prompts and branches. `asked`: steps, width, height (the model's own if None).

    Raises `ModelError` for a UNet, whose depths are kept without any measurement, and whatever a request may raise.
    """
    front = PaintFront.load(files, options)
    loaded = load_painter(files, site, options)
    if isinstance(loaded.family.denoiser, UNetDenoiser):
        raise ModelError(f"{files.reference} is a UNet: its presets need no calibration")
    program = ProbingProgram(loaded.family, Presets({}, MagProbe()), site)
    program.ratios = []
    loop = Loop(site, {"model": program})
    kind, task = (Film, "video") if front.recipe.frames else (Paint, "image")
    for seed, prompt in enumerate(prompts):
        work = front.prepare(task, kind(prompt=prompt, seed=seed, **asked)).work
        if work is not None:
            loop.handle(Submit(f"prompt {seed}", "model", task, pack(work)))
    while loop.step():
        for report in loop.take_reports():
            if isinstance(report, Failed):
                raise PolymuxError.from_wire(report.error)
    mean = torch.stack(program.ratios).mean(0)
    return [round(float(ratio), 5) for ratio in mean]


def write_calibration(path: Path, ratios: Sequence[float], prompts: int) -> None:
    """In the form that `presets` reads."""
    path.write_text(json.dumps({"steps": len(ratios), "prompts": prompts, "ratios": list(ratios)}) + "\n")
