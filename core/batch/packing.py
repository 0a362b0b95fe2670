"""Packing a plan of token rows into the input of one launch, and the block tables that launches look up by slot."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from polymux.core.batch.decoder import AdaptedTokens, TokenBatch, TokenModel
from polymux.core.batch.depth import Depths
from polymux.core.batch.frame import ON_DEVICE, Frame, list_ids
from polymux.core.batch.places import place_inlays, turn_tokens
from polymux.core.batch.plan import Grant, Plan
from polymux.core.batch.sequence import TokenRow, token_row
from polymux.core.cache.blocks import CacheSpec, view_blocks, view_parts
from polymux.core.compute.attention import PagedBatch, PagedContext
from polymux.core.engine.site import Site
from polymux.core.errors import InternalError

SHARING_ROWS = 8
SHARED_TOKENS = 256
"""Rows and common tokens from which on a common prefix is read once for all rows."""


class Packer:
    """Owns what the device knows of every slot: its row's blocks, and the token it sampled last.

    One slot more than rows exists: the padding of recorded launches.
    """

    def __init__(self, model: TokenModel, cache: CacheSpec, site: Site, extra: CacheSpec | None = None) -> None:
        """`extra`: what a drafter keeps in every block behind the model's own `cache`."""
        device = site.device.torch
        self._device = site.device
        self._block = cache.units
        self._attention = site.attention(model.shape.dtype, model.shape.head_dim)
        self.recordable = model.recordable and self._attention.recordable
        self._view, *others = view_parts(site.arena, [cache] if extra is None else [cache, extra])
        self.extra = others[0] if others else None
        self._slabs = view_blocks(site.arena, model.slab) if model.slab is not None else None
        self._adapters = view_blocks(site.arena, model.adapters.spec) if model.adapters is not None else None
        self._alone = site.settings.deterministic
        self._inlays = view_blocks(site.arena, model.inlay) if model.inlay is not None else None
        self._inlay_units = self._inlays.shape[1] if self._inlays is not None else 0
        self.capacity = min(self._view.shape[0] * cache.units, model.shape.context)
        slots = site.settings.max_rows + 1
        columns = -(-self.capacity // cache.units)
        # with cross-attention, the last column holds the slab that the row reads
        self._tables = torch.zeros(slots, columns + (self._slabs is not None), dtype=torch.int64, device=device)
        self._slab_table = self._tables[:, columns:] if self._slabs is not None else None
        self.last = torch.zeros(slots, dtype=torch.int64, device=device)
        self.depths = Depths(model.depth, self.last, site) if model.depth is not None else None
        self.axes = model.shape.axes
        self._shifts = torch.zeros(slots, dtype=torch.int64, device=device) if self.axes > 1 else None
        """Per slot, what makes a place behind the prompt a position."""

    def lend(self, model: TokenModel, site: Site) -> Packer:
        """A packer of the same rows, tables and blocks for a drafter's model, whose keys and values are the extra
        part; the tokens it draws are its own."""
        if self.extra is None:
            raise InternalError("a drafter's model needs a part of the cache")
        packer = copy(self)
        packer._attention = site.attention(model.shape.dtype, model.shape.head_dim)
        packer.recordable = model.recordable and packer._attention.recordable
        packer._view, packer.extra, packer._adapters = self.extra, None, None
        packer.last = torch.zeros_like(self.last)
        return packer

    def repack(self, batch: TokenBatch) -> TokenBatch:
        """The tokens of a launch once more, for this packer's model; no logits are wanted."""
        rows = replace(batch.context.batch, memo={})
        nothing = batch.sampled[:0]
        context = PagedContext(self._attention, self._view, rows, self._slabs)
        return TokenBatch(batch.ids, batch.positions, nothing, nothing, context)

    def admit(self, row: TokenRow) -> None:
        row.tabled = 0
        row.resumed = len(row.tokens)
        if self._shifts is not None:
            self._shifts[row.slot] = row.request.shift

    def extend_tables(self, rows: list[TokenRow]) -> None:
        """Tell the device of the blocks that rows have got since their last launch."""
        slots, columns, blocks = [], [], []
        for row in rows:
            known, count = row.tabled, len(row.blocks)
            if known == count:
                continue
            if self._slab_table is not None and not known:
                slots.append(row.slot)
                columns.append(self._tables.shape[1] - 1)
                blocks.append(row.reads[0].blocks[0])
            slots += [row.slot] * (count - known)
            columns += range(known, count)
            blocks += row.blocks[known:]
            row.tabled = count
        if slots:
            sent = self._device.upload({"slots": slots, "columns": columns, "blocks": blocks})
            self._tables[sent["slots"], sent["columns"]] = sent["blocks"]

    def pack(self, plan: Plan) -> TokenBatch:
        """The launch's input, worked out on the host and sent in one piece. Single tokens come first."""
        plan.grants.sort(key=lambda grant: (grant.count > 1, adapter_of(grant)))
        ids: list[int] = []
        starts, lengths, slots, finals = [0], [], [], []
        inlaid: list[np.ndarray] = []
        further: list[int] = []
        for place, grant in enumerate(plan.grants):
            row, end = token_row(grant.row), grant.start + grant.count
            ids += list_ids(grant, row)
            if grant.start < row.prompt_length and self._inlay_units:
                inlaid += place_inlays(row, starts[-1], grant.start, end, self._inlay_units)
            if self.depths is not None:
                further += self.depths.place(row, starts[-1], grant.start, end)
            slots.append(row.slot)
            starts.append(len(ids))
            lengths.append(end)
            if grant.final:
                finals.append(place)
        counts = np.diff(starts)
        sent = self._device.upload(
            {
                "ids": ids,
                "positions": np.arange(len(ids)) + np.repeat(np.subtract(lengths, starts[1:]), counts),
                "turns": turn_tokens(plan, self.axes),
                "token_slots": np.repeat(slots, counts),
                "slots": slots,
                "starts": starts,
                "lengths": lengths,
                "finals": finals,
                "inlaid": np.concatenate(inlaid) if inlaid else [],
                "further": further,
            }
        )
        batch = PagedBatch(
            starts,
            lengths,
            self._block,
            self._tables,
            sent["slots"],
            sent["starts"],
            sent["lengths"],
            sent["token_slots"],
            sent["positions"],
        )
        if self._slabs is not None:
            batch.slabs = [grant.row.reads[0].blocks[0] for grant in plan.grants]
            batch.slab_units = [grant.row.reads[0].units for grant in plan.grants]
            batch.slab_table = self._slab_table
        known = torch.where(sent["ids"] == ON_DEVICE, self.last[sent["token_slots"]], sent["ids"])
        context = PagedContext(self._attention, self._view, batch, self._slabs)
        turns = sent["positions"]
        if sent["turns"].numel():
            turns = sent["turns"].view(-1, len(ids))
            turns = turns[0] if turns.shape[0] == 1 else turns
        packed = TokenBatch(known, turns, sent["starts"][sent["finals"] + 1] - 1, sent["finals"], context)
        if inlaid and self._inlays is not None:
            packed.places, blocks, offsets = sent["inlaid"].view(-1, 3).T.contiguous()
            packed.vectors = self._inlays[blocks, offsets]
        packed.adapted = self._find_adapted(plan, starts)
        if self.depths is not None:
            packed.further = self.depths.gather(sent["token_slots"], sent["further"])
        return packed

    def _find_adapted(self, plan: Plan, starts: list[int]) -> list[AdaptedTokens]:
        """Neighbours with the same adapter are computed together, unless a row's bits may depend on no neighbour."""
        found: list[AdaptedTokens] = []
        block = -1
        for grant, start, end in zip(plan.grants, starts, starts[1:]):
            before, block = block, adapter_of(grant)
            if block < 0 or self._adapters is None:
                continue
            if block == before and not self._alone:
                start = found.pop().start
            found.append(AdaptedTokens(start, end, self._adapters[block]))
        return found

    def sample_guesses(self, batch: TokenBatch, plan: Plan) -> None:
        """Have the model give logits behind every guess's predecessor as well, after the others."""
        places: list[int] = []
        rows: list[int] = []
        for place, (grant, first) in enumerate(zip(plan.grants, batch.context.batch.starts)):
            guesses = len(grant.guesses)
            places += range(first + grant.count - 1 - guesses, first + grant.count - 1)
            rows += [place] * guesses
        sent = self._device.upload({"places": places, "rows": rows})
        batch.sampled = torch.cat([batch.sampled, sent["places"]])
        batch.finals = torch.cat([batch.finals, sent["rows"]])

    def shared_prefix(self, rows: list[TokenRow]) -> int:
        """Leading tokens that all rows have in common, as whole blocks; 0 where reading them once would not pay."""
        if len(rows) < SHARING_ROWS:
            return 0
        # lists compare element by element: what the smallest and the largest share, all share
        low, high = min(row.blocks for row in rows), max(row.blocks for row in rows)
        count = next((place for place, (a, b) in enumerate(zip(low, high)) if a != b), min(len(low), len(high)))
        tokens = count * self._block
        return tokens if tokens >= SHARED_TOKENS else 0

    def pack_idle(self, counts: list[int]) -> TokenBatch:
        """A launch of padding, as rows of so many tokens each, none of more than `capacity`: it computes, but
        writes and means nothing."""
        if max(counts) > self.capacity:
            raise InternalError(f"a row of {max(counts)} tokens has no blocks beyond {self.capacity}")
        starts = [0, *accumulate(counts)]
        upload = self._device.upload({"starts": starts, "lengths": counts})
        ends, padding = upload["starts"][1:] - 1, self._tables.shape[0] - 1
        idle = torch.full((starts[-1],), -1, dtype=torch.int64, device=self._tables.device)
        slots = torch.full_like(idle, padding)
        batch = PagedBatch(
            starts,
            counts,
            self._block,
            self._tables,
            slots[: len(counts)],
            upload["starts"],
            upload["lengths"],
            slots,
            idle,
            slab_table=self._slab_table,
        )
        order = torch.arange(len(counts), device=idle.device)
        return TokenBatch(
            torch.zeros_like(idle), idle, ends, order, PagedContext(self._attention, self._view, batch, self._slabs)
        )

    def pack_step(self, slots: Tensor, positions: Tensor, shared: Tensor | None) -> TokenBatch:
        """One decode step in which everything is looked up by slot, (B,) each. Padding has position -1."""
        rows = slots.shape[0]
        order = torch.arange(rows + 1, device=slots.device)
        batch = PagedBatch(
            list(range(rows + 1)),
            [self.capacity] * rows,
            self._block,
            self._tables,
            slots,
            order,
            positions + 1,
            slots,
            positions,
            shared=shared,
            slab_table=self._slab_table,
        )
        context = PagedContext(self._attention, self._view, batch, self._slabs)
        turns = positions if self._shifts is None else positions + self._shifts[slots]
        further = self.depths.further[slots] if self.depths is not None else None
        return TokenBatch(self.last[slots], turns, order[:-1], order[:-1], context, further=further)

    def pack_ladder(self, ids: Tensor, slots: Tensor, places: Tensor, positions: Tensor) -> TokenBatch:
        """Several tokens of each row in a recorded launch, all of them sampled: `ids` and their `places` (B, n), of
        rows whose first token here has place `positions` (B,). Padding has place -1."""
        rows, count = ids.shape
        order = torch.arange(rows * count, device=slots.device)
        spread = slots[:, None].expand(-1, count).flatten()
        batch = PagedBatch(
            list(range(0, rows * count + 1, count)),
            [self.capacity] * rows,
            self._block,
            self._tables,
            slots,
            torch.arange(0, rows * count + 1, count, device=slots.device),
            positions.clamp(min=0) + count,
            spread,
            places.flatten(),
            slab_table=self._slab_table,
        )
        context = PagedContext(self._attention, self._view, batch, self._slabs)
        return TokenBatch(ids.flatten(), places.flatten(), order, order // count, context)

    def send_frame(self, frame: Frame, plan: Plan) -> Tensor:
        """A launch that is recorded: its buffer, filled and sent in one piece. Single tokens come first."""
        plan.grants.sort(key=lambda grant: grant.count > 1)
        return self._device.send(frame.fill(plan.grants, self._tables.shape[0] - 1))

    def pack_frame(self, frame: Frame, buffer: Tensor) -> TokenBatch:
        """The launch that a frame's buffer (size,) describes; what is in it is known on the device alone."""
        sent = frame.split(buffer)
        batch = PagedBatch(
            [],
            [self.capacity] * frame.rows,
            self._block,
            self._tables,
            sent["slots"],
            sent["starts"],
            sent["lengths"],
            sent["token_slots"],
            sent["positions"],
            bounds=frame.bounds,
        )
        ids = torch.where(sent["ids"] == ON_DEVICE, self.last[sent["token_slots"]], sent["ids"])
        turns = sent["positions"]
        if self._shifts is not None:
            turns = turns + self._shifts[sent["token_slots"]]
        further = self.depths.further[sent["token_slots"]] if self.depths is not None else None
        context = PagedContext(self._attention, self._view, batch, self._slabs)
        return TokenBatch(ids, turns, sent["sampled"], sent["finals"], context, further=further)


def adapter_of(grant: Grant) -> int:
    """The block of the row's adapter; -1 for none."""
    adapter = token_row(grant.row).adapter
    return -1 if adapter is None else adapter.blocks[0]


def continues(grant: Grant, row: TokenRow) -> bool:
    """One more token of the grant's row after one that this residency has sampled: the device has all it needs."""
    return grant.count == 1 and grant.start >= row.resumed and row.foresight is None and row.adapter is None
