"""Encoders whose outputs are kept by content: a picture that is known costs no pass, whoever asks.

A row names its items by digest and leaves blocks of vectors for each. Items whose blocks are indexed are shared, also
with rows of other jobs; the rest are computed in as many launches as the budget takes. A row that finds everything
ends at once. All its blocks are promised when it is admitted: rows that each hold a part cannot wait for one another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from polymux.core.batch.plan import Grant, Plan
from polymux.core.batch.row import Row
from polymux.core.batch.stage import Outcomes, Stage, Ticket
from polymux.core.cache.blocks import CacheSpec, view_blocks
from polymux.core.engine.site import Site
from polymux.core.errors import InternalError, PolymuxError

if TYPE_CHECKING:
    from polymux.core.engine.job import Job


class Encoder(ABC):
    """What a modality supplies: one pass over a batch of items, each of which becomes vectors."""

    inlay: CacheSpec
    """One block: (vectors, dim), of one unit. An item's vectors fill as many blocks as they need."""

    @abstractmethod
    def count(self, item: Any) -> int:
        """How many vectors an item becomes, at least one."""

    @abstractmethod
    def forward(self, items: list[Any]) -> list[Tensor | PolymuxError]:
        """Per item its vectors, (count, dim), on the device; or what fails that item's row alone."""


class EncodeRow(Row):
    """Items by digest, each once. When it has ended, `holding` has the blocks of `digests`, in that order."""

    def __init__(self, job: Job, items: dict[bytes, Any], blocks: dict[bytes, int] | None = None) -> None:
        """`blocks`: how many each item fills; None: one each."""
        super().__init__(job)
        self.items = items
        self.sizes = dict.fromkeys(items, 1) if blocks is None else blocks
        self.order = list(items)
        """Known ones first, once the row is admitted."""
        self.digests = list(self.pieces())
        """Per block, in that order."""
        self.known = 0
        """Blocks that were indexed when the row was admitted, and so are the first."""
        self.found: frozenset[bytes] = frozenset()
        """Items that were known when the row was admitted."""
        self.published = 0
        self.keeps = True

    def pieces(self) -> Iterator[bytes]:
        """A digest for every block."""
        for digest in self.order:
            yield from cut_digest(digest, self.sizes[digest])

    def arrange(self, find: Callable[[bytes], int | None]) -> None:
        """Put the items whose blocks are all indexed first."""
        whole = [
            digest
            for digest in self.items
            if all(find(piece) is not None for piece in cut_digest(digest, self.sizes[digest]))
        ]
        self.found = frozenset(whole)
        self.known = sum(self.sizes[digest] for digest in whole)
        self.order = [*whole, *(digest for digest in self.items if digest not in self.found)]
        self.digests = list(self.pieces())

    def places(self) -> dict[bytes, int]:
        """Where each item's blocks begin in the holding."""
        places, start = {}, 0
        for digest in self.order:
            places[digest] = start
            start += self.sizes[digest]
        return places

    def between(self, start: int, end: int) -> list[tuple[bytes, int]]:
        """Items whose blocks begin from `start` on and before `end`, with where they begin."""
        return [(digest, place) for digest, place in self.places().items() if start <= place < end]


def cut_digest(digest: bytes, blocks: int) -> list[bytes]:
    return [digest] if blocks == 1 else [digest + place.to_bytes(4, "little") for place in range(blocks)]


class ContentStage(Stage):
    """Makes what items are kept as, for many rows. A unit is a block; items run whole."""

    def __init__(self, name: str, spec: CacheSpec, site: Site, *, max_units: int, max_rows: int = 64) -> None:
        self.name = name
        self.max_units = max_units
        self.max_rows = max_rows
        self.cache = spec
        self.view = view_blocks(site.arena, spec)
        """All blocks, to be written."""

    @abstractmethod
    def fill(self, items: list[Any], blocks: list[list[int]]) -> list[PolymuxError | None]:
        """Write what each item is kept as into its blocks; an error fails that item's row alone."""

    def want(self, row: Row) -> int:
        row = encode_row(row)
        return len(row.digests) - row.scheduled

    def cut(self, row: Row, wanted: int, budget: int) -> int:
        """Whole items within the budget; one above it runs with what is left of it."""
        row = encode_row(row)
        units = 0
        for digest, _ in row.between(row.scheduled, len(row.digests)):
            if units and units + row.sizes[digest] > budget:
                break
            units += row.sizes[digest]
        return units if budget > 0 else 0

    def units(self, row: Row) -> int:
        return len(encode_row(row).digests)

    def reach(self, row: Row, units: int) -> int:
        return self.units(row)

    def complete(self, row: Row) -> bool:
        return row.done == self.units(row)

    def launch(self, plan: Plan) -> Ticket:
        chosen = [
            (row, digest, place)
            for grant in plan.grants
            for row in [encode_row(grant.row)]
            for digest, place in row.between(grant.start, grant.start + grant.count)
        ]
        items = [row.items[digest] for row, digest, _ in chosen]
        blocks = [row.blocks[place : place + row.sizes[digest]] for row, digest, place in chosen]
        with torch.inference_mode():
            errors = self.fill(items, blocks)
        if len(errors) != len(items):
            raise InternalError(f"stage {self.name} returned {len(errors)} results for {len(items)} items")
        return Ticket(plan, errors)

    def collect(self, ticket: Ticket) -> Outcomes:
        outcomes = Outcomes()
        results = iter(ticket.results)
        for grant in ticket.plan.grants:
            row = encode_row(grant.row)
            error = self._blame(row, grant, results)
            if row.job.over or row.ended.done:
                continue
            if error is not None:  # nothing of this launch is published for others
                outcomes.failed.append((row, error))
                continue
            row.done = grant.start + grant.count
            if self.complete(row):
                outcomes.ended.append(row)
        return outcomes

    @staticmethod
    def _blame(row: EncodeRow, grant: Grant, results: Iterator[PolymuxError | None]) -> PolymuxError | None:
        errors = [next(results) for _ in row.between(grant.start, grant.start + grant.count)]
        return next((error for error in errors if error is not None), None)


class EncodeStage(ContentStage):
    """Runs one encoder over the items of many rows."""

    def __init__(self, name: str, model: Encoder, site: Site, *, max_units: int, max_rows: int = 64) -> None:
        super().__init__(name, model.inlay, site, max_units=max_units, max_rows=max_rows)
        self.model = model
        self._device = site.device

    def blocks(self, item: Any) -> int:
        """How many blocks an item's vectors fill."""
        return -(-self.model.count(item) // self.model.inlay.shape[0])

    def fill(self, items: list[Any], blocks: list[list[int]]) -> list[PolymuxError | None]:
        results = self.model.forward(items)
        self._keep([(each, found) for each, found in zip(blocks, results) if isinstance(found, Tensor)])
        return [found if isinstance(found, PolymuxError) else None for found in results]

    def _keep(self, kept: list[tuple[list[int], Tensor]]) -> None:
        """Write vectors into their blocks."""
        if not kept:
            return
        size = self.model.inlay.shape[0]
        orders = [np.arange(len(vectors)) for _, vectors in kept]
        sent = self._device.upload(
            {
                "blocks": np.concatenate([np.asarray(each)[order // size] for (each, _), order in zip(kept, orders)]),
                "offsets": np.concatenate([order % size for order in orders]),
            }
        )
        self.view[sent["blocks"], sent["offsets"]] = torch.cat([vectors for _, vectors in kept]).to(self.view.dtype)


def encode_row(row: Row) -> EncodeRow:
    if not isinstance(row, EncodeRow):
        raise InternalError(f"an encoder stage was given a {type(row).__name__}")
    return row
