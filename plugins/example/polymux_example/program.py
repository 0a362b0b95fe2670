"""The half in the engine: one stage draws the next letter of any number of names at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file

from polymux.core.batch.oneshot import OneShotModel, OneShotRow, OneShotStage
from polymux.core.engine.job import Job
from polymux.core.engine.site import Site
from polymux.core.errors import InvalidRequest
from polymux.core.pipeline import Program
from polymux_example.work import ALPHABET, Invent, Letters

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

LONGEST = 24


@dataclass(frozen=True)
class Place:
    """Where a name stands: its last two letters, and the draw that decides the next one."""

    before: int
    last: int
    temperature: float
    draw: float


class LetterTable(OneShotModel):
    """How often a letter follows two others. All items of a launch are looked up together."""

    def __init__(self, counts: torch.Tensor) -> None:
        self.logits = counts.log()

    def forward(self, items: list[Any], slabs: list[torch.Tensor]) -> list[Any]:
        device = self.logits.device
        before = torch.tensor([item.before for item in items], device=device)
        last = torch.tensor([item.last for item in items], device=device)
        warmth = torch.tensor([item.temperature for item in items], device=device)
        draws = torch.tensor([item.draw for item in items], device=device)
        shares = (self.logits[before, last] / warmth[:, None]).softmax(-1).cumsum(-1)
        return list((shares < draws[:, None]).sum(-1).clamp(max=len(ALPHABET) - 1))


class NamesProgram(Program):
    def __init__(self, stage: OneShotStage) -> None:
        self.work = {"invent": Invent}
        self.stage = stage
        self.stages = (stage,)

    async def run(self, job: Job, work: msgspec.Struct) -> None:
        """All names of a job grow side by side: each is a strand of its own."""
        if not isinstance(work, Invent):
            raise InvalidRequest("malformed work")
        names = [job.spawn(self._grow(job, work, index)) for index in range(work.count)]
        for name in names:
            await name

    async def _grow(self, job: Job, work: Invent, index: int) -> None:
        random = np.random.default_rng([work.seed & 0xFFFFFFFF, index])  # its draws are its own, whoever runs beside
        before = last = 0
        for _ in range(LONGEST):
            row = OneShotRow(job, Place(before, last, work.temperature, float(random.random())), 1, index)
            await job.start(self.stage, row)
            before, last = last, int(row.result)
            if last == 0:
                return
            job.receipt.output_units += 1
            job.emit("letters", Letters(index, ALPHABET[last]))

    def describe(self) -> dict[str, Any]:
        return {"dtype": "float32"}


def load_names(files: ModelFiles, site: Site) -> Program:
    (weights,) = files.weights()
    counts = load_file(weights)["counts"].to(site.device.torch)
    return NamesProgram(OneShotStage("letters", LetterTable(counts), site, max_units=256, to_host=True))
