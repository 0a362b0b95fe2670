"""Attention over packed rows: the contexts a forward pass carries, and the backends that compute it.

A launch packs the tokens of many rows into one sequence. Two contexts say how they attend:

    PackedContext  rows see themselves only, nothing is cached (encoders, embeddings)
    PagedContext   rows write their keys and values into blocks and read all of their own (decoders)

A backend implements both on some devices. `sdpa` is the reference and runs everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from polymux.core.errors import ConfigError, InternalError


@dataclass(frozen=True)
class AttentionOptions:
    """What differs between layers and models. `window`: keys a query sees, itself included; None: all."""

    scale: float
    """Of queries by keys."""
    causal: bool = True
    """No row sees what comes after it."""
    window: int | None = None
    """Positions that are seen back; None: all."""
    softcap: float | None = None
    """Scores are bent to stay below it; None: they are not."""
    sinks: Tensor | None = None
    """(heads,): a logit per head that takes part in the softmax and attends to nothing."""


@dataclass(frozen=True)
class RowBounds:
    """What a recorded launch may be, where the host knows no more: at most `singles` rows bring one token, and stand in
    front; at most `tokens` come in all."""

    singles: int
    tokens: int


@dataclass
class PagedBatch:
    """One launch of a token stage, as attention sees it: R rows, T tokens, in the same order; rows that bring one
    token come first."""

    starts: list[int]
    """R + 1: where each row's new tokens start in the packed batch."""
    lengths: list[int]
    """R: tokens of each row once this launch has written its own."""
    block: int
    """Tokens of one block."""
    tables: Tensor
    """(slots, columns) int64: the blocks of every slot's row, in order. What stands behind them is stale."""
    slots: Tensor
    """(R,) int64: each row's slot."""
    row_starts: Tensor
    """(R + 1,) int64: `starts` on the device."""
    row_lengths: Tensor
    """(R,) int64: `lengths` on the device."""
    token_slots: Tensor
    """(T,) int64: the slot each new token belongs to; -1 for padding, which is neither written nor read."""
    positions: Tensor
    """(T,) int64: the place of each new token in its row."""
    memo: dict[Any, Any] = field(default_factory=dict)
    """What a backend works out once a launch and uses in every layer."""
    shared: Tensor | None = None
    """(1,) int64: leading tokens that all rows have in common, block by block; a backend may read them once."""
    slabs: list[int] = field(default_factory=list)
    """R: the slab each row's cross-attention reads; empty for decoders without one, and in recorded steps."""
    slab_units: list[int | None] = field(default_factory=list)
    """R: the leading units of each row's slab that say everything (`Holding.units`); a backend may read them alone."""
    slab_table: Tensor | None = None
    """(slots, 1) int64: the same by slot, on the device."""
    bounds: RowBounds | None = None
    """Only what is on the device says how many tokens a row brings: `starts` are empty, `lengths` the most there may
    be. A row may bring none."""

    @property
    def decoding(self) -> bool:
        """Every row brings exactly one token."""
        return self.bounds is None and self.starts[-1] == len(self.lengths)

    @cached_property
    def singles(self) -> int:
        """How many rows bring one token. They come first."""
        if self.bounds is not None:
            return self.bounds.singles
        return sum(end - start == 1 for start, end in pairwise(self.starts))

    @cached_property
    def even(self) -> int:
        """How many tokens each row brings, where all bring as many; else 0."""
        if self.bounds is not None:
            return 0
        counts = {end - start for start, end in pairwise(self.starts)}
        return counts.pop() if len(counts) == 1 else 0

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def largest(self) -> int:
        """The most tokens that a row brings."""
        if self.bounds is not None:
            return self.bounds.tokens
        return max(end - start for start, end in pairwise(self.starts))


@dataclass
class PackedRows:
    """Rows of a packed batch that attend inside themselves. `starts`: R + 1, where each row's tokens start."""

    starts: list[int]
    row_starts: Tensor | None = None
    """(R + 1,) int32: `starts` on the device, where whoever launches has sent them along."""
    memo: dict[Any, Any] = field(default_factory=dict)
    """What a backend works out once a launch and uses in every layer."""

    @cached_property
    def longest(self) -> int:
        return max(end - start for start, end in pairwise(self.starts))

    def edges(self, device: torch.device) -> Tensor:
        """(R + 1,) int32 on `device`."""
        if self.row_starts is None:
            self.row_starts = torch.tensor(self.starts, dtype=torch.int32, device=device)
        return self.row_starts


class AttentionBackend(ABC):
    """Queries are (T, heads, dim), keys and values (T, kv heads, dim); heads are a multiple of kv heads."""

    name: str
    """What settings and `polymux doctor` call it."""
    recordable = False
    """A launch may be recorded as a graph: its kernels look at nothing on the host."""

    pages = True
    """It reads blocks and slabs. One that does not serves rows that see only themselves."""

    @abstractmethod
    def refuses(self, device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
        """Why it cannot serve such heads here, or None. Probed, never assumed from a version."""

    def claims(self, options: AttentionOptions) -> bool:
        """Whether it computes attention of this kind (window, soft cap, sinks) inside packed rows."""
        return True

    @abstractmethod
    def packed(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, options: AttentionOptions) -> Tensor:
        """Attention inside each row of a packed batch: (T, heads, dim). The three may be views of one tensor."""

    def write(self, key: Tensor, value: Tensor, cache: Tensor, batch: PagedBatch) -> None:
        """Put the new keys and values into their blocks of `cache` (blocks, 2, block, kv heads, dim), one layer's."""
        if "places" not in batch.memo:
            blocks = batch.tables[batch.token_slots, batch.positions // batch.block]
            batch.memo["places"] = (blocks, batch.positions % batch.block)
        blocks, offsets = batch.memo["places"]
        cache[blocks, 0, offsets] = key.to(cache.dtype)
        cache[blocks, 1, offsets] = value.to(cache.dtype)

    @abstractmethod
    def paged(self, query: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions) -> Tensor:
        """Each row's new queries attend to all the row has in `cache`, its new tokens included: (T, heads, dim)."""

    @abstractmethod
    def cross(self, query: Tensor, slabs: Tensor, batch: PagedBatch, options: AttentionOptions) -> Tensor:
        """Each row attends to all of its own slab: `slabs` is (slabs, 2, frames, kv heads, dim) of one layer."""


class PackedContext:
    """Rows of a packed batch that see only themselves."""

    def __init__(self, backend: AttentionBackend, starts: list[int], row_starts: Tensor | None = None) -> None:
        self.backend = backend
        self.rows = PackedRows(starts, row_starts)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        return self.backend.packed(query, key, value, self.rows, options)


class PagedContext:
    """Rows that extend their own blocks. `cache` is the pool's view: (blocks, layers, 2, block, kv heads, dim).

    A decoder with cross-attention also reads `slabs`: (slabs, layers, 2, frames, kv heads, dim).
    """

    def __init__(
        self, backend: AttentionBackend, cache: Tensor, batch: PagedBatch, slabs: Tensor | None = None
    ) -> None:
        self.backend = backend
        self.cache = cache
        self.batch = batch
        self.slabs = slabs

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        cache = self.cache[:, layer]
        self.backend.write(key, value, cache, self.batch)
        return self.backend.paged(query, cache, self.batch, options)

    def attend_slab(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        """Cross-attention of (T, heads, dim) queries to what the row's encoder left."""
        if self.slabs is None:
            raise InternalError("cross-attention was reached in a launch without slabs")
        return self.backend.cross(query, self.slabs[:, layer], self.batch, options)


AttentionContext = PackedContext | PagedContext


def choose_attention(
    backends: Iterable[AttentionBackend], device: torch.device, dtype: torch.dtype, dim: int
) -> AttentionBackend:
    """The first backend that reads blocks and does not refuse; the reference when none is offered.

    For rows that see only themselves, `packed.choose_packed` chooses by what is fastest.
    """
    from polymux.core.compute.sdpa import SdpaAttention

    reasons = []
    for backend in (*(backend for backend in backends if backend.pages), SdpaAttention()):
        reason = explain_refusal(backend, device, dtype, dim)
        if reason is None:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise ConfigError("no attention backend can serve this model: " + "; ".join(reasons))


def explain_refusal(backend: AttentionBackend, device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """Why a backend cannot serve such heads, or None; a stranger's probe that breaks costs its backend alone."""
    try:
        return backend.refuses(device, dtype, dim)
    except Exception as error:
        return f"its probe failed ({type(error).__name__}: {error})"
