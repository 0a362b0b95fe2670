"""The token family: autoregressive decoding for language models, speech recognisers and codec speech models.

A launch packs prompt chunks and single decode steps of many rows. The token a row samples stays on the device in the
row's slot and feeds the next launch, so launch k+1 can be out before the host has seen the tokens of launch k.
"""

from __future__ import annotations

import logging
from operator import attrgetter

import torch
from torch import Tensor

from polymux.core.batch.decoder import TokenBatch, TokenModel, TokenShape
from polymux.core.batch.drawing import Drawer, Drawing
from polymux.core.batch.frame import Frame, fits_frames, list_frames
from polymux.core.batch.packing import Packer, continues
from polymux.core.batch.plan import Grant, Plan
from polymux.core.batch.results import collect_tokens
from polymux.core.batch.row import Row
from polymux.core.batch.scoring import sample_scored, score
from polymux.core.batch.sequence import TokenRow, can_replay, token_row
from polymux.core.batch.speculation import Drafter, list_guessed
from polymux.core.batch.stage import Outcomes, Stage, Ticket
from polymux.core.batch.warming import list_mixed, list_sharing
from polymux.core.cache.blocks import CacheSpec, join_specs, paged_kv
from polymux.core.compute.ahead import compile_ahead
from polymux.core.compute.graphs import DecodeGraphs
from polymux.core.compute.mixed import MixedGraphs
from polymux.core.compute.rules import LogitRule
from polymux.core.engine.site import Site
from polymux.core.stopwatch import part

__all__ = ["TokenBatch", "TokenModel", "TokenShape", "TokenStage"]

log = logging.getLogger("polymux.engine")

SEEN = attrgetter("start")
"""Tokens that a grant's attention reads, before its own."""

UNKNOWN = 0
"""In place of a guess that is not made yet."""

TILE = 128
"""Rows of a tile of the libraries' matrix products on a card: a launch of one token more pays for a tile more."""

PROMPT_CHUNK = 64
"""Tokens of a prompt that are computed together at least, so that slices of time do not shred it."""


class TokenStage(Stage):
    """Decodes rows of one model. Rows are `TokenRow`s."""

    shares_prefixes = True
    least_units = PROMPT_CHUNK

    def __init__(self, name: str, model: TokenModel, site: Site, *, drafter: Drafter | None = None) -> None:
        """`drafter`: who guesses tokens ahead."""
        shape = model.shape
        settings = site.settings
        self.name = name
        self.model = model
        self.max_rows = settings.max_rows
        self.max_units = settings.max_units
        self.indivisible = settings.deterministic
        self.grain = TILE if site.device.torch.type == "cuda" else 1
        cache = paged_kv(
            f"{name}.kv",
            layers=shape.layers,
            heads=shape.kv_heads,
            dim=shape.head_dim,
            dtype=shape.dtype,
            block=settings.block,
        )
        if settings.deterministic:
            drafter = None  # a step of several tokens rounds differently
        extra = drafter.cache if drafter is not None else None
        self.cache: CacheSpec = cache if extra is None else join_specs(cache.name, [cache, extra])
        self._packer = Packer(model, cache, site, extra)
        self._drawer = Drawer(shape.vocabulary, site, self._packer.depths)
        self._device = site.device
        self._drafter = drafter
        self._wants_hidden = model.depth is not None or (drafter is not None and drafter.wants_hidden)
        if drafter is not None:
            drafter.bind(self._packer, self._drawer)
        self._graphs: DecodeGraphs | None = None
        if self._packer.recordable and site.device.torch.type == "cuda":
            self._graphs = DecodeGraphs(self._step, self.max_rows, self.max_rows, site.device.torch)
        rounds = drafter is not None and self._graphs is not None
        self._rounds = drafter.open_rounds(model, self.max_rows) if drafter is not None and rounds else None
        self._mixed: MixedGraphs | None = None
        frames = list_frames(self.max_units, self.max_rows)
        # a drafter follows every launch, and slabs are read as the host says
        if self._graphs is not None and frames[0] and drafter is None and model.slab is None and not self.indivisible:
            self._mixed = MixedGraphs(self._mix, frames, self.max_rows, site.device.torch, self._graphs.pool)

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that fits the cache when it is alone, and the model."""
        return self._packer.capacity

    def warm(self) -> None:
        if self._graphs is not None:
            with part("compile"):
                compile_ahead(self.rehearse, self._device.torch)
            with part("rehearsal"):
                self.rehearse()
            with part("record"), torch.inference_mode():
                for graphs in self._all_graphs():
                    self._record_few(graphs)

    def _record_few(self, graphs: DecodeGraphs | MixedGraphs) -> None:
        try:
            graphs.record_few()
        except Exception:
            if graphs is not self._mixed:
                raise
            self._mixed = None
            log.exception("%s looks at the host in launches with prompts: they are not recorded", self.name)

    def rehearse(self) -> None:
        """One launch of every kind, on padding: it computes, but writes and means nothing."""
        with torch.inference_mode():
            for counts in list_mixed(self.max_units, self.capacity):
                batch = self._packer.pack_idle(counts)
                self._drawer.rehearse(self.model.forward(batch), batch.context.batch.slots[batch.finals])
            for rows in list_sharing(self.max_rows):
                slots = self._packer.last.new_full((rows,), self.max_rows)
                self._step(slots, torch.full_like(slots, -1), torch.zeros_like(slots[:1]), ())

    def tend(self) -> bool:
        with torch.inference_mode():
            return any(graphs.record_more() for graphs in self._all_graphs())

    def _all_graphs(self) -> list[DecodeGraphs | MixedGraphs]:
        depths = self._packer.depths
        known = (self._graphs, depths.graphs if depths is not None else None, self._mixed)
        return [graphs for graphs in known if graphs is not None]

    # ---- what rows want ----

    def want(self, row: Row) -> int:
        row = token_row(row)
        known = len(row.tokens)
        missing = known + row.pending - row.scheduled
        if missing <= 0 or (row.scheduled >= known and row.exhausted):
            return 0
        if missing == 1 and row.foresight is None:
            return 1
        if self.indivisible and missing > 1:  # the same chunks of a prompt, whatever else runs
            return min(missing, self.max_units - row.scheduled % self.max_units)
        if row.foresight is not None and row.generated:
            if row.pending:
                return 0
            if missing == 1:
                room = min(row.request.max_tokens - len(row.generated), self.capacity - len(row.tokens)) - 1
                return 1 + max(min(row.foresight.reach(row.tokens), room), 0)
        return missing

    def units(self, row: Row) -> int:
        return token_row(row).length + 1

    def admitted(self, row: Row) -> None:
        row = token_row(row)
        if self._drafter is not None and row.request.speculative and row.foresight is None:
            row.foresight = self._drafter.open(row)
        self._packer.admit(row)
        self._drawer.admit(row)

    def released(self, row: Row) -> None:
        self._drawer.release(token_row(row))

    def grant(self, row: Row, units: int) -> Grant:
        row = token_row(row)
        start = row.scheduled
        row.scheduled = start + units
        guessed = row.scheduled - row.length
        if guessed < 0:
            return Grant(row, start, units, final=False)
        row.pending += 1
        return Grant(row, start, units, True, [UNKNOWN] * guessed if guessed else ())

    # ---- launch ----

    def launch(self, plan: Plan) -> Ticket:
        with torch.inference_mode():
            if self._graphs is not None:  # programs start in this order: what takes longest must not start last
                plan.grants.sort(key=SEEN, reverse=True)
            rows = [token_row(grant.row) for grant in plan.grants]
            self._packer.extend_tables(rows)
            if self._rounds is not None and self._rounds.admits(plan, rows):
                return self._rounds.launch(plan, rows)
            self._guess(plan)
            if self._graphs is not None and all(map(continues, plan.grants, rows)):
                return self._replay(plan, rows, self._graphs)
            frame = self._frame(plan, rows)
            if self._mixed is not None and frame is not None:
                return self._replay_mixed(plan, frame, self._mixed)
            batch = self._packer.pack(plan)
            finals = [grant for grant in plan.grants if grant.final]
            draws = [*finals, *list_guessed(finals)]
            if len(draws) > len(finals):
                self._packer.sample_guesses(batch, plan)
            targets = sample_scored(batch, plan, self._device)
            batch.wants_hidden = self._wants_hidden
            logits = self.model.forward(batch)
            if self._drafter is not None:
                self._drafter.follow(batch)
            scores = score(logits[len(draws) :], targets, plan) if targets is not None else {}
            if not finals:
                return Ticket(plan, self._device.copy_to_host(scores) if scores else None)
            slots = batch.context.batch.slots[batch.finals]
            if self._packer.depths is not None:
                self._packer.depths.keep(slots, batch)
            return self._draw(plan, Drawing(draws, logits[: len(draws)], slots, scores))

    def _guess(self, plan: Plan) -> None:
        guessing = [grant for grant in plan.grants if grant.guesses]
        if guessing and self._drafter is not None:
            rows = [token_row(grant.row) for grant in guessing]
            guesses = self._drafter.draft(rows, [len(grant.guesses) for grant in guessing])
            for grant, guess in zip(guessing, guesses, strict=True):
                grant.guesses = guess

    def join(self, ticket: Ticket) -> None:
        """The host knows every row's newest token: what may follow is masked, then drawn."""
        drawing: Drawing = ticket.results
        with torch.inference_mode():
            ticket.results = self._drawer.draw(drawing, self._packer.last)

    def _draw(self, plan: Plan, drawing: Drawing) -> Ticket:
        if drawing.guided:
            return Ticket(plan, drawing, joins=True)
        return Ticket(plan, self._drawer.draw(drawing, self._packer.last))

    def _replay(self, plan: Plan, rows: list[TokenRow], graphs: DecodeGraphs) -> Ticket:
        """A recorded step has drawn already; its tokens count where nothing but a token is wanted."""
        slots, positions = [row.slot for row in rows], [grant.start for grant in plan.grants]
        shared = self._packer.shared_prefix(rows)
        if can_replay(rows):
            _, *drawn = graphs.run(slots, positions, shared, rows[0].request.rules)
            results = dict(zip(("tokens", "finite", "logprobs"), drawn)) | self._drawer.deepen(plan.grants)
            return Ticket(plan, self._device.copy_to_host(results))
        logits, *_ = graphs.run(slots, positions, shared)
        return self._draw(plan, Drawing(plan.grants, logits, self._device.upload({"slots": slots})["slots"]))

    def _frame(self, plan: Plan, rows: list[TokenRow]) -> Frame | None:
        """The recorded launch that serves a plan, if there is one."""
        if self._mixed is None:
            return None
        units = self._packer.depths is not None
        if not all(fits_frames(grant, row, units) for grant, row in zip(plan.grants, rows)):
            return None
        return self._mixed.choose(plan)

    def _replay_mixed(self, plan: Plan, frame: Frame, graphs: MixedGraphs) -> Ticket:
        """As `_replay`, for pieces of prompts beside single tokens."""
        logits, *drawn = graphs.run(frame, self._packer.send_frame(frame, plan))
        finals = [grant for grant in plan.grants if grant.final]
        if not finals:
            return Ticket(plan)
        if all(token_row(grant.row).request.plain for grant in finals):
            named = {name: tensor[: len(finals)] for name, tensor in zip(("tokens", "finite"), drawn)}
            return Ticket(plan, self._device.copy_to_host(named | self._drawer.deepen(finals)))
        slots = self._device.upload({"slots": [token_row(grant.row).slot for grant in finals]})["slots"]
        return self._draw(plan, Drawing(finals, logits[: len(finals)], slots))

    def _mix(self, frame: Frame, buffer: Tensor) -> tuple[Tensor, ...]:
        """One launch with pieces of prompts as a graph records it."""
        batch = self._packer.pack_frame(frame, buffer)
        batch.wants_hidden = self._packer.depths is not None
        logits = self.model.forward(batch)
        sent = frame.split(buffer)
        slots = sent["drawn_slots"]
        if self._packer.depths is not None:
            self._packer.depths.keep(slots, batch)
        drawn = self._drawer.draw_step(logits, slots, sent["drawn_places"], ())
        self._packer.last[slots] = drawn[0]
        return logits, *drawn

    def _step(
        self, slots: Tensor, positions: Tensor, shared: Tensor | None, rules: tuple[LogitRule, ...]
    ) -> tuple[Tensor, ...]:
        """One decode step as a graph records it."""
        batch = self._packer.pack_step(slots, positions, shared)
        batch.wants_hidden = self._packer.depths is not None
        logits = self.model.forward(batch)
        if self._packer.depths is not None:
            self._packer.depths.keep(slots, batch)
        drawn = self._drawer.draw_step(logits, slots, positions + 1, rules)
        self._packer.last[slots] = drawn[0]
        return logits, *drawn

    def collect(self, ticket: Ticket) -> Outcomes:
        return collect_tokens(ticket, self.model.depth)
