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
from polymux.core.batch.sequence import TokenRow
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
    """`speculation = {drafter = "model", model = "reference or folder", tokens = 5}`; also `tier`, `quantization` and
    `dtype`, as for a model of its own."""

    name = "model"

    def open(self, model: TokenModel, tokens: int, options: Mapping[str, Any], site: Site) -> Drafter:
        folder = options.get("model")
        if not isinstance(folder, str):
            raise ConfigError("speculation: a draft model is named by `model`", param="speculation")
        draft = load_decoder(
            Path(folder),
            site.device.torch,
            read_dtype(options) if "dtype" in options else model.shape.dtype,
            tier=options.get("tier", "fast"),
            quantization=options.get("quantization"),
            quantizers=site.quantizers,
        )
        return DraftModel(draft, site, tokens)


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

    def bind(self, packer: Packer, drawer: Drawer) -> None:
        if self.model.shape.context < packer.capacity:
            raise ConfigError(
                f"the draft model's context is {self.model.shape.context} tokens, which is less than the "
                f"{packer.capacity} of the model it guesses for",
                param="speculation",
            )
        self._vocabulary = drawer.vocabulary
        if self.model.shape.vocabulary != self._vocabulary:
            raise ConfigError(
                f"the draft model knows {self.model.shape.vocabulary} tokens, the model it guesses for "
                f"{self._vocabulary}: they must be the same",
                param="speculation",
            )
        if self.model.shape.axes != packer.axes:
            raise ConfigError("the draft model counts positions in another way", param="speculation")
        self._packer = packer.lend(self.model, self._site)
        self._drawer = drawer
        if self._packer.recordable and drawer.slots is not None:
            most = self._site.settings.max_rows
            self._graphs = DecodeGraphs(self._step, most, most, self._site.device.torch)

    def open(self, row: TokenRow) -> Foresight:
        return Foresight(self._longest)

    def draft(self, rows: Sequence[TokenRow], counts: Sequence[int]) -> list[list[int]]:
        order = sorted(range(len(rows)), key=lambda place: -counts[place])  # whoever is done is behind the others
        ranked = [rows[place] for place in order]
        wanted = [counts[place] for place in order]
        told = self._replay(ranked, wanted) if self._replays(ranked) else self._decode(ranked, wanted)
        guesses: list[list[int]] = [[] for _ in rows]
        for tokens in told:
            for place, token in zip(order, tokens):
                guesses[place].append(token)
        return guesses

    def follow(self, batch: TokenBatch) -> None:
        self.model.forward(self._packer.repack(batch))

    def _decode(self, rows: list[TokenRow], counts: list[int]) -> list[list[int]]:
        """Step by step, the tokens of the rows that still guess; each step's go into the next on the device."""
        told: list[Tensor] = []
        for step in range(counts[0]):
            going = sum(count > step for count in counts)
            grants = [Grant(row, len(row.tokens) - 1 + step, 1) for row in rows[:going]]
            batch = self._packer.pack(Plan("draft", grants))
            logits = self.model.forward(batch)
            slots = batch.context.batch.slots
            tokens = self._drawer.decide(Drawing(grants, logits, slots))["tokens"]
            self._packer.last[slots] = tokens
            told.append(tokens)
        return _read(told)

    def _replays(self, rows: list[TokenRow]) -> bool:
        return self._graphs is not None and all(row.request.plain for row in rows)

    def _replay(self, rows: list[TokenRow], counts: list[int]) -> list[list[int]]:
        if self._graphs is None:
            raise InternalError("only a CUDA device records draft steps")
        slots = [row.slot for row in rows]
        sent = self._site.device.upload({"slots": slots, "newest": [row.tokens[-1] for row in rows]})
        self._packer.last[sent["slots"]] = sent["newest"]
        told: list[Tensor] = []
        for step in range(counts[0]):
            going = sum(count > step for count in counts)
            positions = [len(row.tokens) - 1 + step for row in rows[:going]]
            told.append(self._graphs.run(slots[:going], positions, 0)[1].clone())
        return _read(told)

    def _step(
        self, slots: Tensor, positions: Tensor, shared: Tensor | None, rules: tuple[LogitRule, ...]
    ) -> tuple[Tensor, ...]:
        """One draft step as a graph records it."""
        if self._drawer.slots is None:
            raise InternalError("only a CUDA device records draft steps")
        logits = self.model.forward(self._packer.pack_step(slots, positions, shared))
        tokens, finite = self._drawer.slots.draw(logits, slots, positions + 1)
        self._packer.last[slots] = tokens
        return logits, tokens, finite


def _read(told: list[Tensor]) -> list[list[int]]:
    """The tokens of every step on the host. Waits for the device: the launch that checks them is packed there."""
    return [tokens.tolist() for tokens in torch.cat(told).cpu().split([len(tokens) for tokens in told])]
