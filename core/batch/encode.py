"""Encoders whose outputs are kept by content: a picture that is known costs no pass, whoever asks.

A row names its items by digest and leaves one block for each. Blocks that are indexed are shared, also with rows of
other jobs; the rest are computed in as many launches as the budget takes. A row that finds everything ends at once.
All its blocks are promised when it is admitted: rows that each hold a part cannot wait for one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from polymux.core.batch.oneshot import OneShotModel
from polymux.core.batch.plan import Plan
from polymux.core.batch.row import Row
from polymux.core.batch.stage import Outcomes, Stage, Ticket
from polymux.core.cache.blocks import view_blocks
from polymux.core.engine.site import Site
from polymux.core.errors import InternalError, PolymuxError

if TYPE_CHECKING:
    from polymux.core.engine.job import Job


class EncodeRow(Row):
    """Items by digest, each once. When it has ended, the blocks of `holding` are those of `digests`, in that order."""

    def __init__(self, job: Job, items: dict[bytes, Any]) -> None:
        super().__init__(job)
        self.items = items
        self.digests = list(items)
        """Known ones first, once the row is admitted."""
        self.found: frozenset[bytes] = frozenset()
        """What was known when the row was admitted."""
        self.published = 0
        self.keeps = True

    def arrange(self, known: Sequence[bytes]) -> None:
        """Put the known digests first."""
        self.found = frozenset(known)
        self.digests = [*known, *(digest for digest in self.items if digest not in self.found)]


class EncodeStage(Stage):
    """Runs one encoder over the items of many rows. A unit is an item."""

    def __init__(self, name: str, model: OneShotModel, site: Site, *, max_units: int, max_rows: int = 64) -> None:
        if model.slab is None:
            raise InternalError(f"stage {name}: an encoder says what it leaves")
        self.name = name
        self.model = model
        self.max_units = max_units
        self.max_rows = max_rows
        self.cache = model.slab
        self._blocks = view_blocks(site.arena, model.slab)

    def want(self, row: Row) -> int:
        row = encode_row(row)
        return len(row.digests) - row.scheduled

    def units(self, row: Row) -> int:
        return len(encode_row(row).digests)

    def reach(self, row: Row, units: int) -> int:
        return self.units(row)

    def complete(self, row: Row) -> bool:
        return row.done == self.units(row)

    def launch(self, plan: Plan) -> Ticket:
        items: list[Any] = []
        blocks: list[torch.Tensor] = []
        for grant in plan.grants:
            row = encode_row(grant.row)
            for place in range(grant.start, grant.start + grant.count):
                items.append(row.items[row.digests[place]])
                blocks.append(self._blocks[row.blocks[place]])
        with torch.inference_mode():
            results = self.model.forward(items, blocks)
        if len(results) != len(items):
            raise InternalError(f"stage {self.name} returned {len(results)} results for {len(items)} items")
        return Ticket(plan, results)

    def collect(self, ticket: Ticket) -> Outcomes:
        outcomes = Outcomes()
        results = iter(ticket.results)
        for grant in ticket.plan.grants:
            row = encode_row(grant.row)
            errors = [each for _, each in zip(range(grant.count), results) if isinstance(each, PolymuxError)]
            if row.job.over or row.ended.done:
                continue
            if errors:  # nothing of this launch is published for others
                outcomes.failed.append((row, errors[0]))
                continue
            row.done = grant.start + grant.count
            if self.complete(row):
                outcomes.ended.append(row)
        return outcomes


def encode_row(row: Row) -> EncodeRow:
    if not isinstance(row, EncodeRow):
        raise InternalError(f"an encoder stage was given a {type(row).__name__}")
    return row
