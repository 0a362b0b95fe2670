"""For tests of the denoise family: a tiny FLUX transformer, and a program that runs requests kept in a table."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

from polymux.core.batch.denoise import DenoiseStage
from polymux.core.batch.trajectory import DenoiseRequest, DenoiseRow
from polymux.core.engine.job import Job
from polymux.core.errors import InvalidRequest
from polymux.core.pipeline import Program
from polymux.core.testing.drive import Driver

CHANNELS = 4
JOINT = 12
POOLED = 10


class DenoiseWork(msgspec.Struct):
    """Names of requests in the program's table; each becomes a row, and branch i is the i-th name."""

    names: list[str]


class Latent(msgspec.Struct):
    """The final latent of row `index`."""

    index: int
    values: np.ndarray


class DenoiseProgram(Program):
    """Serves the task `denoise`: one row per named request, and its latent as an output."""

    def __init__(self, stage: DenoiseStage, requests: Mapping[str, DenoiseRequest]) -> None:
        self.work = {"denoise": DenoiseWork}
        self.stage = stage
        self.stages = (stage,)
        self.requests = requests

    async def run(self, job: Job, work: msgspec.Struct) -> None:
        if not isinstance(work, DenoiseWork):
            raise InvalidRequest("malformed work")
        rows = [DenoiseRow(job, self.requests[name], index) for index, name in enumerate(work.names)]
        for row in rows:
            job.start(self.stage, row)
        for index, row in enumerate(rows):
            await row
            if row.result is not None:
                job.emit("latent", Latent(index, row.result.cpu().numpy()))


def read_latents(driver: Driver, job: str) -> list[torch.Tensor]:
    """The final latents of a job, by row."""
    latents = driver.outputs(job, "latent", Latent)
    return [torch.from_numpy(latent.values) for latent in sorted(latents, key=lambda latent: latent.index)]


def tiny_flux(seed: int = 0, *, guidance: bool = True, layers: int = 2) -> FluxTransformer2DModel:
    """Two double and three single blocks; weights large enough that timestep, guidance and text all matter."""
    torch.manual_seed(seed)
    model = FluxTransformer2DModel(
        in_channels=CHANNELS * 4,
        num_layers=layers,
        num_single_layers=layers + 1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=JOINT,
        pooled_projection_dim=POOLED,
        guidance_embeds=guidance,
        axes_dims_rope=(2, 2, 4),
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
    return model


def flow_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """As FLUX.1-dev configures it: the shift follows the resolution."""
    return FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
