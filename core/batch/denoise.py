"""The denoise family: images and video. A launch takes one step of many rows, each at a timestep of its own.

Latents, schedulers and random states belong to the rows, so requests with different step counts, guidance and seeds
share a pass, join at any step, and leave at any step. The update is enqueued with the pass: launch k+1 can be out
before the host has seen launch k. What the host learns later is only that a step is done, and that it was finite.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor

from polymux.core.batch.cost import LaunchCost
from polymux.core.batch.denoiser import BlockModel, DenoiseBatch, DenoiseModel
from polymux.core.batch.laxity import order
from polymux.core.batch.plan import Grant, Plan
from polymux.core.batch.reuse import Entry, ReusingPass
from polymux.core.batch.row import Row
from polymux.core.batch.stage import Outcomes, Stage, Ticket
from polymux.core.batch.trajectory import DenoiseRow, Trajectory
from polymux.core.cache.saved import Saved, SavedTokens, saved_tokens
from polymux.core.compute.device import HostCopy
from polymux.core.engine.site import Site
from polymux.core.engine.wire import pack
from polymux.core.errors import InternalError, InvalidRequest
from polymux.core.tasks import Preview, Progress
from polymux.core.vocabulary import Output

PROGRESS = "progress"
"""The `kind` of the `Output` that carries a `tasks.Progress`."""

PREVIEW = "preview"
"""The `kind` of the `Output` that carries a `tasks.Preview`."""


class DenoiseStage(Stage):
    """Denoises rows of one model. Rows are `DenoiseRow`s, and end with their latent on the device.

    `max_units` bounds a launch: more rows than keep the device busy only make every row wait longer. Rows of a
    transformer may have a step cache each; where one must measure before it decides, the launch has a join.
    """

    indivisible = True
    arranges = True

    def __init__(
        self,
        name: str,
        model: DenoiseModel,
        site: Site,
        *,
        max_units: int,
        max_rows: int = 64,
        sketch: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`sketch` makes a small picture, (height, width, 3) uint8, of a clean latent, (1, *shape)."""
        self.name = name
        self.model = model
        self.sketch = sketch
        self.max_units = max_units
        self.max_rows = max_rows
        self._device = site.device
        self._tokens: SavedTokens | None = None
        if isinstance(model, BlockModel):
            self.cache = saved_tokens(f"{name}.saved", model.dim, model.dtype)
            self._tokens = SavedTokens(site.arena, self.cache)

    # ---- what rows want ----

    def want(self, row: Row) -> int:
        row = _denoise_row(row)
        return row.size if row.next_step < row.steps else 0

    def units(self, row: Row) -> int:
        request = _denoise_row(row).request
        if request.rule is None or not isinstance(self.model, BlockModel):
            return 0
        return request.rule.planes * self.model.tokens(request) * len(request.conditions)

    def reach(self, row: Row, units: int) -> int:
        return self.units(row)  # what a row saves does not grow with its steps

    def admitted(self, row: Row) -> None:
        row = _denoise_row(row)
        request = row.request
        row.size = self.model.size(request) * len(request.conditions)
        with torch.inference_mode():
            row.trajectory = Trajectory(request, self._device.torch)
        if request.rule is not None and isinstance(self.model, BlockModel):
            tokens = self.model.tokens(request)
            row.saved = [Saved(request.rule, row.steps, tokens, branch) for branch in range(len(request.conditions))]

    def released(self, row: Row) -> None:
        row = _denoise_row(row)
        row.trajectory, row.saved = None, []

    def arrange(self, rows: list[Row], cost: LaunchCost) -> None:
        rows.sort(key=lambda row: order(_denoise_row(row), cost))

    def grant(self, row: Row, units: int) -> Grant:
        row = _denoise_row(row)
        row.group = self._group(row)
        return super().grant(row, units)

    def compatible(self, first: Row, row: Row) -> bool:
        first, row = _denoise_row(first), _denoise_row(row)
        if first.request.strict or row.request.strict:
            return False
        return first.group == self._group(row)

    def _group(self, row: DenoiseRow) -> Hashable:
        """Rows with different adapters take turns: their mix could not be compiled once, and that is worth more than
        sharing a pass."""
        adapter = row.request.adapter
        return self.model.group(row), None if adapter is None else adapter.data_ptr()

    # ---- launch ----

    def launch(self, plan: Plan) -> Ticket:
        rows = self._due(plan)
        with torch.inference_mode():
            self._adapt(rows)
            if any(row.saved for row in rows):
                reusing = self._begin(rows)
                if reusing.distances is not None:
                    return Ticket(plan, reusing, joins=True)
                self._advance(rows, reusing.complete())
            elif rows:
                self._advance(rows, self.model.forward(self._gather(rows)))
            return Ticket(plan, self._check(plan))

    def join(self, ticket: Ticket) -> None:
        """The one wait of a launch whose rows measure: the host learns how far each signal has moved."""
        reusing: ReusingPass = ticket.results
        rows = self._due(ticket.plan)
        with torch.inference_mode():
            self._adapt(rows)
            self._advance(rows, reusing.complete(reusing.fetch_distances()))
            ticket.results = self._check(ticket.plan)

    def _adapt(self, rows: list[DenoiseRow]) -> None:
        if rows:
            self.model.adapt(rows[0].request.adapter)

    def _due(self, plan: Plan) -> list[DenoiseRow]:
        """The rows that take their step now. A launch that failed is run again: nobody may take a step twice."""
        rows = [_denoise_row(grant.row) for grant in plan.grants]
        if self._tokens is None and any(row.request.rule is not None for row in rows):
            raise InvalidRequest("this model computes every step: it has no step cache", param="cache")
        return [row for row, grant in zip(rows, plan.grants) if _trajectory(row).taken * row.size == grant.start]

    def _begin(self, rows: list[DenoiseRow]) -> ReusingPass:
        if not isinstance(self.model, BlockModel) or self._tokens is None:
            raise InternalError("rows have step caches, but the model has no blocks")
        entries: list[Entry] = []
        for row in rows:
            for branch in range(len(row.request.conditions)):
                saved = row.saved[branch] if row.saved else None
                if saved is not None:
                    saved.locate(row.blocks, self._device.torch)
                entries.append(Entry(_trajectory(row).taken, saved))
        reusing = ReusingPass(self.model, self._tokens, self._gather(rows), entries)
        reusing.begin()
        return reusing

    def _gather(self, rows: list[DenoiseRow]) -> DenoiseBatch:
        latents: list[Tensor] = []
        timesteps: list[Tensor] = []
        conditions: list[Mapping[str, Tensor]] = []
        for row in rows:
            trajectory = _trajectory(row)
            branches = len(row.request.conditions)
            latents.append(trajectory.model_input.expand(branches, *row.request.shape))
            timesteps.append(trajectory.clock[trajectory.taken].expand(branches))
            conditions += row.request.conditions
        expert = self.model.expert(rows[0].request, _trajectory(rows[0]).taken)
        return DenoiseBatch(torch.cat(latents), torch.cat(timesteps), conditions, expert)

    def _advance(self, rows: list[DenoiseRow], predictions: Tensor) -> None:
        """Enqueue every row's update. `predictions`: those of all branches in turn, (P, *shape)."""
        first = 0
        for row in rows:
            branches = len(row.request.conditions)
            prediction = self.model.combine(row.request, predictions[first : first + branches].float())
            trajectory = _trajectory(row)
            if self.sketch is not None and trajectory.taken + 1 in row.request.previews:
                row.sketches[trajectory.taken + 1] = self.sketch(trajectory.estimate(prediction))
            trajectory.advance(prediction)
            first += branches

    def _check(self, plan: Plan) -> HostCopy:
        results = {
            "finite": torch.stack([_trajectory(grant.row).latents.isfinite().all() for grant in plan.grants]),
        }
        for place, grant in enumerate(plan.grants):
            row = _denoise_row(grant.row)
            for step, sketch in row.sketches.items():
                results[f"{place} {step}"] = sketch
            row.sketches = {}
        return self._device.copy_to_host(results)

    # ---- collect ----

    def collect(self, ticket: Ticket) -> Outcomes:
        outcomes = Outcomes()
        copy: HostCopy = ticket.results
        results = copy.read()
        for place, (grant, finite) in enumerate(zip(ticket.plan.grants, results.pop("finite").tolist())):
            row = _denoise_row(grant.row)
            row.done = grant.start + grant.count
            if row.job.over or row.ended.done:
                continue
            if not finite:
                outcomes.failed.append((row, InternalError("the model's output was not finite for this request")))
                continue
            self._report(row, outcomes)
            step = row.done // row.size
            if f"{place} {step}" in results:
                outcomes.reports.append(_preview(row, step, results[f"{place} {step}"]))
        return outcomes

    @staticmethod
    def _report(row: DenoiseRow, outcomes: Outcomes) -> None:
        step = row.done // row.size
        if row.saved and not any(saved.cache.computed[step - 1] for saved in row.saved):
            row.job.receipt.steps_skipped += 1
        else:
            row.job.receipt.steps_run += 1
        if row.request.publish:
            progress = Progress(row.branch, step, row.steps)
            outcomes.reports.append(Output(row.job.id, PROGRESS, pack(progress)))
        if step == row.steps:
            row.result = _trajectory(row).latents[0]
            row.measured = [torch.stack(list(saved.measured.values())) for saved in row.saved if saved.measured]
            outcomes.ended.append(row)


def _preview(row: DenoiseRow, step: int, pixels: Tensor) -> Output:
    number = row.request.previews.index(step)
    height, width, _ = pixels.shape
    preview = Preview(row.branch, number, width, height, pixels.numpy().tobytes())
    return Output(row.job.id, PREVIEW, pack(preview))


def _denoise_row(row: Row) -> DenoiseRow:
    if not isinstance(row, DenoiseRow):
        raise InternalError(f"a denoise stage was given a {type(row).__name__}")
    return row


def _trajectory(row: Row) -> Trajectory:
    trajectory = _denoise_row(row).trajectory
    if trajectory is None:
        raise InternalError("a launch names a row that holds no slot")
    return trajectory
