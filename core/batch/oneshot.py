"""The one-shot family: items that need a single pass (embeddings, encoders, decoders of latents, vocoders).

A launch takes as many waiting items as fit its budget of units (tokens, frames, pixels) and runs them as one packed
batch. With `on_host`, the pass runs on the host executor beside the device, and the loop goes on meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from polymux.core.batch.plan import Plan
from polymux.core.batch.row import Row
from polymux.core.batch.stage import Outcomes, Stage, Ticket
from polymux.core.cache.blocks import CacheSpec, view_blocks
from polymux.core.compute.device import HostCopy
from polymux.core.engine.site import Site
from polymux.core.errors import InternalError, PolymuxError
from polymux.core.stopwatch import part

if TYPE_CHECKING:
    from polymux.core.engine.job import Job

AHEAD = 1
"""Passes that wait for a core to become free: it then need not wait for the loop."""


@dataclass
class Parted:
    """A result of which only `host` comes to the host with `to_host`; `kept` stays where it is."""

    host: torch.Tensor
    kept: Any


class OneShotModel(ABC):
    """What a modality supplies: one pass over a batch of items."""

    apart = False
    """With `on_host`: passes share nothing, so that each core runs one."""

    slab: CacheSpec | None = None
    """What each item's pass leaves on the device for other rows; the row then `keeps` it."""

    @abstractmethod
    def forward(self, items: list[Any], slabs: list[torch.Tensor]) -> list[Any]:
        """One result per item, in order. A result may be a tensor, which then stays on the device, or anything else.

        `slabs` holds each item's own slab, of the shape of `slab`, to be written; it is empty without one.
        A `PolymuxError` in place of a result fails that item alone.
        """

    def compatible(self, first: Any, item: Any) -> bool:
        """Whether two items may share a pass."""
        return True

    def rehearse(self, most: int) -> None:
        """Run once what passes of up to so many units need: kernels are compiled, and the fastest are chosen."""


class OneShotRow(Row):
    """One item, `size` units large. After the pass, `result` is what the model made of it."""

    def __init__(self, job: Job, item: Any, size: int, branch: int = 0) -> None:
        super().__init__(job, branch)
        self.item = item
        self.size = size
        self.result: Any = None


class OneShotStage(Stage):
    """Runs items of one model. `to_host` brings tensor results to the host before the rows end."""

    indivisible = True

    def __init__(
        self,
        name: str,
        model: OneShotModel,
        site: Site,
        *,
        max_units: int,
        max_rows: int = 256,
        to_host: bool = False,
        on_host: bool = False,
        head_start_ms: float = 0.0,
    ) -> None:
        self.name = name
        self.model = model
        self.max_units = max_units
        self.max_rows = max_rows
        self.on_host = on_host
        self.head_start_ms = head_start_ms
        self.cache = model.slab
        self._slabs = view_blocks(site.arena, model.slab) if model.slab is not None else None
        self._to_host = to_host
        self._device = site.device
        self._executor: Executor = site.cores if model.apart else site.executor
        if model.apart:
            self.abreast = torch.get_num_threads() + AHEAD

    def warm(self) -> None:
        if self._device.torch.type == "cuda" and not self.on_host:
            with part("compile"), torch.inference_mode():
                self.model.rehearse(self.max_units)

    def want(self, row: Row) -> int:
        row = _item_row(row)
        return row.size if row.scheduled == 0 else 0

    def units(self, row: Row) -> int:
        return self.cache.units if self.cache is not None else 0

    def reach(self, row: Row, units: int) -> int:
        return self.units(row)

    def compatible(self, first: Row, row: Row) -> bool:
        return self.model.compatible(_item_row(first).item, _item_row(row).item)

    def launch(self, plan: Plan) -> Ticket:
        items = [_item_row(grant.row).item for grant in plan.grants]
        if self.on_host:
            return Ticket(plan, work=self._executor.submit(self._run, items, []))
        slabs = [self._slabs[grant.row.blocks[0]] for grant in plan.grants] if self._slabs is not None else []
        results = self._run(items, slabs)
        if not self._to_host:
            return Ticket(plan, results)
        return Ticket(plan, (results, self._device.copy_to_host(join_tensors(results))))

    def _run(self, items: list[Any], slabs: list[torch.Tensor]) -> list[Any]:
        with torch.inference_mode():
            results = self.model.forward(items, slabs)
        if len(results) != len(items):
            raise InternalError(f"stage {self.name} returned {len(results)} results for {len(items)} items")
        return results

    def collect(self, ticket: Ticket) -> Outcomes:
        outcomes = Outcomes()
        if ticket.work is not None:
            results = ticket.work.result()
        elif self._to_host:
            results, copy = ticket.results
            host: HostCopy = copy
            part_tensors(results, host.read())
        else:
            results = ticket.results
        for grant, result in zip(ticket.plan.grants, results):
            row = _item_row(grant.row)
            row.done = row.size
            if row.job.over:
                continue
            if isinstance(result, PolymuxError):
                outcomes.failed.append((row, result))
            else:
                row.result = result
                outcomes.ended.append(row)
        return outcomes


def join_tensors(results: list[Any]) -> dict[str, torch.Tensor]:
    """The tensors among the results, end to end, by type: a copy to the host has a price of its own."""
    kinds: dict[str, list[torch.Tensor]] = {}
    for result in results:
        tensor = result.host if isinstance(result, Parted) else result
        if isinstance(tensor, torch.Tensor):
            kinds.setdefault(str(tensor.dtype), []).append(tensor.reshape(-1))
    return {kind: parts[0] if len(parts) == 1 else torch.cat(parts) for kind, parts in kinds.items()}


def part_tensors(results: list[Any], joined: dict[str, torch.Tensor]) -> None:
    """Put what `join_tensors` made of the results in their places again."""
    taken = dict.fromkeys(joined, 0)
    for place, result in enumerate(results):
        tensor = result.host if isinstance(result, Parted) else result
        if not isinstance(tensor, torch.Tensor):
            continue
        kind = str(tensor.dtype)
        first = taken[kind]
        taken[kind] += tensor.numel()
        found = joined[kind][first : taken[kind]].view(tensor.shape)
        results[place] = Parted(found, result.kept) if isinstance(result, Parted) else found


def _item_row(row: Row) -> OneShotRow:
    if not isinstance(row, OneShotRow):
        raise InternalError(f"a one-shot stage was given a {type(row).__name__}")
    return row
