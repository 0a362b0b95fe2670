"""A small model that guesses for a large one (Leviathan et al. 2023; Chen et al. 2023), and how drafters are chosen.

The draft model's keys and values lie in the same blocks as the model's own: a prefix that is found is found for both.
It draws with the seeds, positions and settings of the rows, as the stage does. So where both models are of one mind
the guess is right at any temperature, and it is the model's own draw that is told.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymux.core.batch.decoder import TokenBatch, TokenModel
from polymux.core.batch.drawing import Drawer, Drawing
from polymux.core.batch.packing import Packer
from polymux.core.batch.plan import Grant, Plan
from polymux.core.batch.rounds import GuessRounds, Half
from polymux.core.batch.row import Row
from polymux.core.batch.sequence import TokenRow, can_replay, token_row
from polymux.core.batch.speculation import Drafter, Foresight, LookupDrafter
from polymux.core.cache.blocks import paged_kv
from polymux.core.compute.dtype import read_dtype
from polymux.core.compute.graphs import DecodeGraphs
from polymux.core.compute.load import load_decoder
from polymux.core.compute.rules import LogitRule
from polymux.core.engine.site import Site
from polymux.core.errors import ConfigError, InternalError

MOST = 32
"""Tokens that a row may guess ahead."""


class Drafting(ABC):
    """A kind of drafter, registered through the `drafters` hook; models choose it by name in their option
    `speculation`."""

    name: str
    """What the option's `drafter` calls it."""

    @abstractmethod
    def open(self, model: TokenModel, tokens: int, options: Mapping[str, Any], site: Site) -> Drafter:
        """A drafter for `model` that guesses at most `tokens` ahead.

        `options` is the option `speculation` as it was written; keys of its own are the drafter's. Raises `ConfigError`
        for what is wrong with it, `ModelError` for weights that cannot be loaded.
        """


class Lookup(Drafting):
    """`speculation = {drafter = "lookup", tokens = 8}`, or the number alone."""

    name = "lookup"

    def open(self, model: TokenModel, tokens: int, options: Mapping[str, Any], site: Site) -> Drafter:
        return LookupDrafter(tokens)


class SmallModel(Drafting):
    """`speculation = {drafter = "model", model = "folder", tokens = 5}`; also `tier`, `quantization` and
    `dtype`, as for a model of its own."""

    name = "model"

    def open(self, model: TokenModel, tokens: int, options: Mapping[str, Any], site: Site) -> Drafter:
        draft = load_decoder(
            read_folder(options),
            site.device.torch,
            read_dtype(options) if "dtype" in options else model.shape.dtype,
            tier=options.get("tier", "fast"),
            quantization=options.get("quantization"),
            quantizers=site.quantizers,
        )
        return DraftModel(draft, site, tokens)


def read_folder(options: Mapping[str, Any]) -> Path:
    """Where the option `speculation` says that its draft model is. Raises `ConfigError`."""
    folder = options.get("model")
    if not isinstance(folder, str):
        raise ConfigError("speculation: a draft model is named by `model`", param="speculation")
    return Path(folder)


BUILT_IN: tuple[Drafting, ...] = (Lookup(), SmallModel())


def open_drafter(asked: Any, model: TokenModel, site: Site, draftings: Iterable[Drafting] = ()) -> Drafter | None:
    """The drafter of a model's option `speculation`: a number of tokens, or a table with `drafter` and `tokens`.

    None when nothing is asked for, or where a step of several tokens would round differently from single ones
    (`deterministic`). `draftings` come before core's own. Raises `ConfigError`.
    """
    options = asked if isinstance(asked, Mapping) else {"drafter": Lookup.name, "tokens": asked or 0}
    tokens, name = options.get("tokens", 5), options.get("drafter")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 <= tokens <= MOST:
        raise ConfigError(f"speculation: {tokens!r} is not a number of tokens from 0 to {MOST}", param="speculation")
    known = {drafting.name: drafting for drafting in (*BUILT_IN, *draftings)}
    if name not in known:
        names = ", ".join(sorted(known))
        raise ConfigError(f"speculation: drafter {name!r} is unknown; there are: {names}", param="speculation")
    if not tokens or site.settings.deterministic:
        return None
    return known[name].open(model, tokens, options, site)


class DraftModel(Drafter):
    """Guesses by decoding a smaller model of the same tokens, all rows at once."""

    def __init__(self, model: TokenModel, site: Site, longest: int) -> None:
        shape = model.shape
        self.model = model
        self.cache = paged_kv(
            "draft",
            layers=shape.layers,
            heads=shape.kv_heads,
            dim=shape.head_dim,
            dtype=shape.dtype,
            block=site.settings.block,
        )
        self._site = site
        self._longest = longest
        self._graphs: DecodeGraphs | None = None
        self._rounds: GuessRounds | None = None
        self._covered = 0
        """Rows of the launch to come whose tokens, guesses included, this model has computed."""

    def bind(self, packer: Packer, drawer: Drawer) -> None:
        if self.model.shape.context < packer.capacity:
            raise ConfigError(
                f"the draft model's context is {self.model.shape.context} tokens, which is less than the "
                f"{packer.capacity} of the model it guesses for",
                param="speculation",
            )
        if self.model.shape.vocabulary != drawer.vocabulary:
            raise ConfigError(
                f"the draft model knows {self.model.shape.vocabulary} tokens, the model it guesses for "
                f"{drawer.vocabulary}: they must be the same",
                param="speculation",
            )
        if self.model.shape.axes != packer.axes:
            raise ConfigError("the draft model counts positions in another way", param="speculation")
        self._checking = packer
        self._packer = packer.lend(self.model, self._site)
        self._drawer = drawer
        if self._packer.recordable and drawer.slots is not None:
            most = self._site.settings.max_rows
            self._graphs = DecodeGraphs(self._step, most, most, self._site.device.torch)

    def open_rounds(self, model: TokenModel, most: int) -> GuessRounds | None:
        simple = self._packer.axes == 1 and model.depth is None and self._packer.recordable and self._longest > 0
        if simple and self._checking.recordable:
            halves = Half(model, self._checking), Half(self.model, self._packer)
            self._rounds = GuessRounds(*halves, self._drawer, self._longest, most, self._site.device)
        return self._rounds

    def open(self, row: TokenRow) -> Foresight:
        return Foresight(self._longest, fixed=self._rounds is not None)

    def draft(self, rows: Sequence[TokenRow], counts: Sequence[int]) -> list[list[int]]:
        recorded = self._graphs is not None and can_replay(rows)
        steps: list[list[Grant]] = []
        told: list[Tensor] = []
        with self._drawer.try_out():
            # one step more than guesses: it only leaves the last guess's keys and values
            for step in range(max(counts) + 1):
                going = [row for row, count in zip(rows, counts, strict=True) if count >= step]
                grants = [Grant(row, len(row.tokens) - 1 + step, 1) for row in going]
                if step == max(counts) and not recorded:
                    self._finish(grants)
                    break
                told.append(self._replay(grants, first=step == 0) if recorded else self._decode(grants))
                steps.append(grants)
        self._covered = len(rows)
        guesses: dict[Row, list[int]] = {row: [] for row in rows}
        # waits for the device: the launch that checks the guesses is packed on the host
        for grants, tokens in zip(steps, torch.cat(told).cpu().split([len(tokens) for tokens in told])):
            for grant, token in zip(grants, tokens.tolist(), strict=True):
                guesses[grant.row].append(token)
        return [guesses[row][:count] for row, count in zip(rows, counts, strict=True)]

    def follow(self, batch: TokenBatch) -> None:
        covered, self._covered = self._covered, 0
        if covered < len(batch.context.batch.lengths):  # else guessing has computed all of it
            self.model.forward(self._packer.repack(batch))

    def _decode(self, grants: list[Grant]) -> Tensor:
        """The rows' next tokens, in the order into which packing brings the grants; the next step finds them on the
        device."""
        batch = self._packer.pack(Plan("draft", grants))
        slots = batch.context.batch.slots
        tokens = self._drawer.decide(Drawing(grants, self.model.forward(batch), slots))["tokens"]
        self._packer.last[slots] = tokens
        return tokens

    def _finish(self, grants: list[Grant]) -> None:
        """Their keys and values, and nothing more."""
        batch = self._packer.pack(Plan("draft", grants))
        batch.sampled, batch.finals = batch.sampled[:0], batch.finals[:0]
        self.model.forward(batch)

    def _replay(self, grants: list[Grant], *, first: bool) -> Tensor:
        """The same by a recorded step."""
        if self._graphs is None:
            raise InternalError("only a CUDA device records draft steps")
        rows = [token_row(grant.row) for grant in grants]
        slots = [row.slot for row in rows]
        if first:
            sent = self._site.device.upload({"slots": slots, "newest": [row.tokens[-1] for row in rows]})
            self._packer.last[sent["slots"]] = sent["newest"]
        return self._graphs.run(slots, [grant.start for grant in grants], 0, rows[0].request.rules)[1].clone()

    def _step(
        self, slots: Tensor, positions: Tensor, shared: Tensor | None, rules: tuple[LogitRule, ...]
    ) -> tuple[Tensor, ...]:
        """One draft step as a graph records it."""
        logits = self.model.forward(self._packer.pack_step(slots, positions, shared))
        drawn = self._drawer.draw_step(logits, slots, positions + 1, rules)
        self._packer.last[slots] = drawn[0]
        return logits, *drawn
