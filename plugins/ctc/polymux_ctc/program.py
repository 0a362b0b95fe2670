"""The half in the engine: stretches of any recordings share a pass where they are equally long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCTC

from polymux.core.batch.oneshot import OneShotModel, OneShotRow, OneShotStage
from polymux.core.engine.job import Job
from polymux.core.engine.site import Site
from polymux.core.engine.wire import unpack
from polymux.core.errors import InvalidRequest, ModelError
from polymux.core.pipeline import Program
from polymux_ctc.work import RATE, CtcWork, Spelled, Stretch

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

TOGETHER = 8


class Recogniser(OneShotModel):
    """Samples -> (2, frames): the likeliest class of each frame, and its log probability.

    Only equally long stretches share a pass: models without an attention mask would hear the padding.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def compatible(self, first: Any, item: Any) -> bool:
        return len(first) == len(item)

    def forward(self, items: list[Any], slabs: list[torch.Tensor]) -> list[Any]:
        device = next(self.model.parameters()).device
        logits = self.model(torch.from_numpy(np.stack(items)).to(device)).logits
        best, ids = logits.float().log_softmax(-1).max(-1)
        return list(torch.stack([ids.float(), best], 1))


class CtcProgram(Program):
    def __init__(self, stage: OneShotStage) -> None:
        self.work = {"words": CtcWork, "transcribe": CtcWork}
        self.stage = stage
        self.stages = (stage,)

    async def run(self, job: Job, work: msgspec.Struct) -> None:
        if not isinstance(work, CtcWork):
            raise InvalidRequest("malformed work")
        while not (stretch := unpack(await job.receive(), Stretch)).last:
            row = await job.start(self.stage, OneShotRow(job, stretch.samples, 1))
            ids, logprobs = row.result.numpy()
            job.receipt.input_units += len(stretch.samples) * 100 // RATE
            job.receipt.output_units += len(ids)
            job.emit("spelled", Spelled(ids.astype(np.int32), logprobs, len(stretch.samples)))

    def describe(self) -> dict[str, Any]:
        return {"dtype": "float32"}


def load_ctc(files: ModelFiles, site: Site) -> Program:
    """Raises `ModelError` when transformers cannot load the folder."""
    files.weights()
    try:
        model = AutoModelForCTC.from_pretrained(files.folder, dtype=torch.float32, use_safetensors=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"cannot load a recogniser from {files.reference}: {error}") from error
    model = model.to(site.device.torch).eval().requires_grad_(False)
    return CtcProgram(OneShotStage("spell", Recogniser(model), site, max_units=TOGETHER, to_host=True))
