"""The token family: autoregressive decoding for language models, speech recognisers and codec speech models.

A launch packs prompt chunks and single decode steps of many rows. The token a row samples stays on the device in the
row's slot and feeds the next launch, so launch k+1 can be out before the host has seen the tokens of launch k.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from polymux.core.batch.plan import Grant, Plan
from polymux.core.batch.row import Row
from polymux.core.batch.sequence import TokenRow
from polymux.core.batch.stage import Outcomes, Stage, Ticket
from polymux.core.cache.blocks import CacheSpec, paged_kv, view_blocks
from polymux.core.compute.attention import AttentionBackend, PagedBatch, PagedContext
from polymux.core.compute.device import HostCopy
from polymux.core.compute.masks import MaskUse
from polymux.core.compute.rules import RuleStates
from polymux.core.compute.sampling import Penalties, SampleBatch, sample, wants_penalties
from polymux.core.engine.site import Site
from polymux.core.errors import InternalError, PolymuxError
from polymux.core.text.guide import Guide, MaskWriter
from polymux.core.vocabulary import BranchEnded, Tokens

ON_DEVICE = -1
"""In place of an id: the row's newest token, which the host has not seen yet."""

PROMPT_CHUNK = 64
"""Tokens of a prompt that are computed together at least, so that slices of time do not shred it."""


@dataclass(frozen=True)
class TokenShape:
    """What the cache must hold for a decoder."""

    layers: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    """The longest sequence the model can take."""
    dtype: torch.dtype


@dataclass
class TokenBatch:
    """The packed input of one launch: T tokens of R rows, of which S sample."""

    ids: Tensor
    """(T,) int64."""
    positions: Tensor
    """(T,) int64."""
    sampled: Tensor
    """(S,) int64: places in the packed batch whose logits are wanted."""
    finals: Tensor
    """(S,) int64: the rows they belong to, counted in the batch."""
    context: PagedContext


@dataclass
class Drawing:
    """The second half of a launch: logits that wait for their draw."""

    finals: list[Grant]
    logits: Tensor
    """(S, vocabulary) float32."""
    slots: Tensor
    """(S,) int64: where the tokens go."""


class TokenModel(ABC):
    """What a modality supplies: a decoder over packed rows. It calls `context.attend` in every attention layer."""

    shape: TokenShape
    slab: CacheSpec | None = None
    """What an encoder leaves for each row's cross-attention; rows then read a holding of this class."""

    @abstractmethod
    def forward(self, batch: TokenBatch) -> Tensor:
        """Logits at the sampled places: (S, vocabulary)."""


class TokenStage(Stage):
    """Decodes rows of one model. Rows are `TokenRow`s."""

    shares_prefixes = True
    least_units = PROMPT_CHUNK

    def __init__(self, name: str, model: TokenModel, site: Site) -> None:
        shape = model.shape
        settings = site.settings
        self.name = name
        self.model = model
        self.max_rows = settings.max_rows
        self.max_units = settings.max_units
        self.cache: CacheSpec = paged_kv(
            f"{name}.kv",
            layers=shape.layers,
            heads=shape.kv_heads,
            dim=shape.head_dim,
            dtype=shape.dtype,
            block=settings.block,
        )
        self._device = site.device
        self.indivisible = settings.deterministic
        self._attention: AttentionBackend = site.attention(shape.dtype, shape.head_dim)
        self._view = view_blocks(site.arena, self.cache)
        self._slabs = view_blocks(site.arena, model.slab) if model.slab is not None else None
        columns = -(-min(shape.context, self._view.shape[0] * settings.block) // settings.block)
        self._tables = torch.zeros(self.max_rows, columns, dtype=torch.int64, device=site.device.torch)
        self._last = torch.zeros(self.max_rows, dtype=torch.int64, device=site.device.torch)
        self._penalties: dict[int, Penalties] = {}
        self._rules = RuleStates(self.max_rows, site.device.torch)
        self._masks = MaskWriter(shape.vocabulary)

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that fits the cache when it is alone, and the model."""
        return min(self._view.shape[0] * self.cache.units, self.model.shape.context)

    # ---- what rows want ----

    def want(self, row: Row) -> int:
        row = _token_row(row)
        missing = row.length - row.scheduled
        if missing <= 0 or (row.exhausted and row.scheduled >= len(row.tokens)):
            return 0
        if self.indivisible and missing > 1:  # the same chunks of a prompt, whatever else runs
            return min(missing, self.max_units - row.scheduled % self.max_units)
        return missing

    def units(self, row: Row) -> int:
        return _token_row(row).length + 1

    def admitted(self, row: Row) -> None:
        row = _token_row(row)
        row.tabled = 0
        if wants_penalties(row.request.sampling):
            self._penalties[row.slot] = Penalties.of(
                row.request.prompt, row.generated, self.model.shape.vocabulary, self._device.torch
            )

        self._rules.admit(row.slot, row.request.rules, row.generated)

    def released(self, row: Row) -> None:
        self._penalties.pop(row.slot, None)

    def grant(self, row: Row, units: int) -> Grant:
        row = _token_row(row)
        grant = super().grant(row, units)
        grant.final = row.scheduled == row.length
        if grant.final:
            row.pending += 1
        return grant

    # ---- launch ----

    def launch(self, plan: Plan) -> Ticket:
        with torch.inference_mode():
            finals = [grant for grant in plan.grants if grant.final]
            batch = self._pack(plan)
            logits = self.model.forward(batch)
            if not finals:
                return Ticket(plan)
            drawing = Drawing(finals, logits.float(), batch.context.batch.slots[batch.finals])
            if any(_token_row(grant.row).request.guide is not None for grant in finals):
                return Ticket(plan, drawing, joins=True)
            return Ticket(plan, self._draw(drawing, []))

    def join(self, ticket: Ticket) -> None:
        """The host knows every row's newest token: what may follow is masked, then drawn."""
        drawing: Drawing = ticket.results
        with torch.inference_mode():
            ticket.results = self._draw(drawing, self._mask(drawing.finals))

    def _draw(self, drawing: Drawing, masks: list[MaskUse]) -> HostCopy:
        samples = sample(drawing.logits, self._sample_batch(drawing.finals, masks))
        self._last[drawing.slots] = samples.tokens
        return self._device.copy_to_host(samples.tensors())

    def _mask(self, finals: list[Grant]) -> list[MaskUse]:
        guides: list[Guide] = []
        places: list[int] = []
        for place, grant in enumerate(finals):
            row = _token_row(grant.row)
            if row.request.guide is not None and row.reason is None:  # one that ended draws nothing that counts
                guides.append(row.request.guide)
                places.append(place)
        if not guides:
            return []
        rows = self._device.upload({"rows": places})["rows"]
        return [MaskUse(rows, self._device.send(self._masks.write(guides)))]

    def _pack(self, plan: Plan) -> TokenBatch:
        """The launch's input, worked out on the host and sent in one piece."""
        ids: list[int] = []
        positions: list[int] = []
        token_slots: list[int] = []
        starts, lengths, slots, finals = [0], [], [], []
        changes: list[tuple[int, int, int]] = []
        for place, grant in enumerate(plan.grants):
            row, end = _token_row(grant.row), grant.start + grant.count
            ids += row.tokens[grant.start : end]
            if end > len(row.tokens):
                ids.append(ON_DEVICE)
            positions += range(grant.start, end)
            token_slots += [row.slot] * grant.count
            slots.append(row.slot)
            starts.append(len(ids))
            lengths.append(end)
            if grant.final:
                finals.append(place)
            if row.tabled < len(row.blocks):
                changes += [(row.slot, column, row.blocks[column]) for column in range(row.tabled, len(row.blocks))]
                row.tabled = len(row.blocks)
        sent = self._device.upload(
            {
                "ids": ids,
                "positions": positions,
                "token_slots": token_slots,
                "slots": slots,
                "starts": starts,
                "lengths": lengths,
                "finals": finals,
                "changes": [number for change in changes for number in change],
            }
        )
        if changes:
            rows, columns, blocks = sent["changes"].view(-1, 3).unbind(dim=1)
            self._tables[rows, columns] = blocks
        batch = PagedBatch(
            starts,
            lengths,
            self.cache.units,
            self._tables,
            sent["slots"],
            sent["starts"],
            sent["lengths"],
            sent["token_slots"],
            sent["positions"],
        )
        if self._slabs is not None:
            batch.slabs = [grant.row.reads[0].blocks[0] for grant in plan.grants]
        known = torch.where(sent["ids"] == ON_DEVICE, self._last[sent["token_slots"]], sent["ids"])
        context = PagedContext(self._attention, self._view, batch, self._slabs)
        return TokenBatch(known, sent["positions"], sent["starts"][sent["finals"] + 1] - 1, sent["finals"], context)

    def _sample_batch(self, finals: list[Grant], masks: list[MaskUse]) -> SampleBatch:
        rows = [_token_row(grant.row) for grant in finals]
        # a row watches where its first token is drawn
        watched = [
            row.request.watched if grant.start + grant.count == row.prompt_length else ()
            for row, grant in zip(rows, finals)
        ]
        return SampleBatch(
            samplings=[row.request.sampling for row in rows],
            seeds=[row.request.seed for row in rows],
            positions=[grant.start + grant.count for grant in finals],
            penalties=[self._penalties.get(row.slot) for row in rows],
            logprobs=max((row.request.logprobs for row in rows if row.request.logprobs is not None), default=None),
            rules=masks + self._rules.gather([row.request.rules for row in rows], [row.slot for row in rows]),
            watched=watched,
        )

    # ---- collect ----

    def collect(self, ticket: Ticket) -> Outcomes:
        outcomes = Outcomes()
        for grant in ticket.plan.grants:
            grant.row.done = max(grant.row.done, grant.start + grant.count)
        if ticket.results is None:
            return outcomes
        copy: HostCopy = ticket.results
        results = {name: tensor.tolist() for name, tensor in copy.read().items()}
        finals = [grant for grant in ticket.plan.grants if grant.final]
        for place, grant in enumerate(finals):
            row = _token_row(grant.row)
            row.pending -= 1
            if row.reason is None and not row.ended.done and not row.job.over:
                self._take(row, place, results, outcomes)
        return outcomes

    def _take(self, row: TokenRow, place: int, results: dict[str, list], outcomes: Outcomes) -> None:
        """The host learns the row's newest token."""
        if not results["finite"][place]:
            row.reason = "error"
            outcomes.failed.append((row, InternalError("the model's output was not finite for this request")))
            return
        request = row.request
        token = results["tokens"][place]
        if request.guide is not None:
            try:
                request.guide.take(token)
            except PolymuxError as error:
                row.reason = "error"
                outcomes.failed.append((row, error))
                return
        if request.watched and not row.watched:
            row.watched = results["watched"][place][: len(request.watched)]
        row.tokens.append(token)
        row.started.set()
        if request.logprobs is not None:
            row.logprobs.append(results["logprobs"][place])
        if token in request.stop_ids or (request.guide is not None and request.guide.finished):
            row.reason = "stop"
        elif len(row.tokens) - row.prompt_length >= request.max_tokens:
            row.reason = "length"
        if request.publish:
            outcomes.reports.append(self._report(row, token, place, results))
            if row.reason is not None:
                outcomes.reports.append(BranchEnded(row.job.id, row.branch, row.reason))
        if row.reason is not None:
            outcomes.ended.append(row)

    @staticmethod
    def _report(row: TokenRow, token: int, place: int, results: dict[str, list]) -> Tokens:
        wanted = row.request.logprobs
        if wanted is None:
            return Tokens(row.job.id, row.branch, [token])
        top = None
        if wanted:
            ids, values = results["top_tokens"][place], results["top_logprobs"][place]
            top = [list(zip(ids[:wanted], values[:wanted]))]
        return Tokens(row.job.id, row.branch, [token], [results["logprobs"][place]], top)


def _token_row(row: Row) -> TokenRow:
    if not isinstance(row, TokenRow):
        raise InternalError(f"a token stage was given a {type(row).__name__}")
    return row
