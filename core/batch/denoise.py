"""The denoise family: images and video. A launch takes one step of many rows, each at a timestep of its own.

Latents, schedulers and random states belong to the rows, so requests with different step counts, guidance and seeds
share a pass, join at any step, and leave at any step. The update is enqueued with the pass: launch k+1 can be out
before the host has seen launch k. What the host learns later is only that a step is done, and that it was finite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from polymux.core.batch.plan import Grant, Plan
from polymux.core.batch.row import Row
from polymux.core.batch.stage import Outcomes, Stage, Ticket
from polymux.core.batch.trajectory import DenoiseRequest, DenoiseRow, Trajectory
from polymux.core.compute.device import HostCopy
from polymux.core.engine.site import Site
from polymux.core.engine.wire import pack
from polymux.core.errors import InternalError
from polymux.core.tasks import Progress
from polymux.core.vocabulary import Output

PROGRESS = "progress"
"""The `kind` of the `Output` that carries a `tasks.Progress`."""


@dataclass
class DenoiseBatch:
    """The input of one pass: P rows, every branch of every request in turn, all of one group."""

    latents: Tensor
    """(P, *shape) float32, scaled for the model."""
    timesteps: Tensor
    """(P,) float32, in the scheduler's own units."""
    conditions: list[Mapping[str, Tensor]]
    """Per row."""

    def gather(self, name: str) -> Tensor:
        """One condition of all rows: (P, ...)."""
        return torch.stack([condition[name] for condition in self.conditions])


class DenoiseModel(ABC):
    """What a modality supplies: predictions for rows at different timesteps, and what must agree to share a pass."""

    @abstractmethod
    def forward(self, batch: DenoiseBatch) -> Tensor:
        """The model's predictions (noise, velocity, sample: what the scheduler expects), (P, *shape) float32."""

    def group(self, row: DenoiseRow) -> Hashable:
        """What must be equal for two rows to share their next pass: resolution, text length, expert, adapter."""
        request = row.request
        return (
            request.shape,
            *(tuple(value.shape for value in condition.values()) for condition in request.conditions),
        )

    def size(self, request: DenoiseRequest) -> int:
        """Units of work in one branch of one step: tokens of a transformer."""
        return prod(request.shape[1:])

    def combine(self, request: DenoiseRequest, predictions: Tensor) -> Tensor:
        """The prediction of a request, (1, *shape), from those of its branches, (branches, *shape)."""
        if len(predictions) == 1:
            return predictions
        with_prompt, without = predictions[:1], predictions[1:]
        return without + request.scale * (with_prompt - without)


class DenoiseStage(Stage):
    """Denoises rows of one model. Rows are `DenoiseRow`s, and end with their latent on the device.

    `max_units` bounds a launch: more rows than keep the device busy only make every row wait longer.
    """

    def __init__(self, name: str, model: DenoiseModel, site: Site, *, max_units: int, max_rows: int = 64) -> None:
        self.name = name
        self.model = model
        self.max_units = max_units
        self.max_rows = max_rows
        self._device = site.device

    # ---- what rows want ----

    def want(self, row: Row) -> int:
        row = _denoise_row(row)
        return row.size if row.next_step < row.steps else 0

    def admitted(self, row: Row) -> None:
        row = _denoise_row(row)
        row.size = self.model.size(row.request) * len(row.request.conditions)
        with torch.inference_mode():
            row.trajectory = Trajectory(row.request, self._device.torch)

    def released(self, row: Row) -> None:
        _denoise_row(row).trajectory = None

    def grant(self, row: Row, units: int) -> Grant:
        row = _denoise_row(row)
        return super().grant(row, row.size)  # a step is never cut: one above the budget runs with what is left of it

    def compatible(self, first: Row, row: Row) -> bool:
        return self.model.group(_denoise_row(first)) == self.model.group(_denoise_row(row))

    # ---- launch ----

    def launch(self, plan: Plan) -> Ticket:
        # a launch that failed is run again in halves: rows whose step is already taken must not take it twice
        rows = [_denoise_row(grant.row) for grant in plan.grants]
        due = [row for row, grant in zip(rows, plan.grants) if _trajectory(row).taken * row.size == grant.start]
        with torch.inference_mode():
            self._take_step(due)
            latents = torch.cat([_trajectory(row).latents for row in rows])
            finite = latents.isfinite().flatten(1).all(1)
        return Ticket(plan, self._device.copy_to_host({"finite": finite}))

    def _take_step(self, rows: list[DenoiseRow]) -> None:
        """Enqueue one step of every row: one pass, then each row's update."""
        if not rows:
            return
        predictions = self.model.forward(_gather(rows))
        first = 0
        for row in rows:
            branches = len(row.request.conditions)
            prediction = self.model.combine(row.request, predictions[first : first + branches].float())
            _trajectory(row).advance(prediction)
            first += branches

    # ---- collect ----

    def collect(self, ticket: Ticket) -> Outcomes:
        outcomes = Outcomes()
        copy: HostCopy = ticket.results
        for grant, finite in zip(ticket.plan.grants, copy.read()["finite"].tolist()):
            row = _denoise_row(grant.row)
            row.done = grant.start + grant.count
            if row.job.over or row.ended.done:
                continue
            if not finite:
                outcomes.failed.append((row, InternalError("the model's output was not finite for this request")))
                continue
            self._report(row, outcomes)
        return outcomes

    @staticmethod
    def _report(row: DenoiseRow, outcomes: Outcomes) -> None:
        step = row.done // row.size
        row.job.receipt.steps_run += 1
        if row.request.publish:
            progress = Progress(row.branch, step, row.steps)
            outcomes.reports.append(Output(row.job.id, PROGRESS, pack(progress)))
        if step == row.steps:
            row.result = _trajectory(row).latents[0]
            outcomes.ended.append(row)


def _gather(rows: list[DenoiseRow]) -> DenoiseBatch:
    latents, timesteps, conditions = [], [], []
    for row in rows:
        trajectory = _trajectory(row)
        branches = len(row.request.conditions)
        latents.append(trajectory.model_input.expand(branches, *row.request.shape))
        timesteps.append(trajectory.clock[trajectory.taken].expand(branches))
        conditions += row.request.conditions
    return DenoiseBatch(torch.cat(latents), torch.cat(timesteps), conditions)


def _denoise_row(row: Row) -> DenoiseRow:
    if not isinstance(row, DenoiseRow):
        raise InternalError(f"a denoise stage was given a {type(row).__name__}")
    return row


def _trajectory(row: Row) -> Trajectory:
    trajectory = _denoise_row(row).trajectory
    if trajectory is None:
        raise InternalError("a launch names a row that holds no slot")
    return trajectory
