"""The choice between the backends that can: measured once for each case, and remembered in the cache."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from polymux.core.compute.attention import AttentionBackend, AttentionOptions, PackedRows, explain_refusal
from polymux.core.compute.packed.backends import PackedBackend
from polymux.core.compute.packed.probe import describe, try_packed
from polymux.core.compute.packed.table import Case, Table, round_length
from polymux.core.compute.sdpa import SdpaAttention

log = logging.getLogger("polymux.compute")


class MeasuredAttention(PackedBackend):
    """Computes each case with the fastest of some backends."""

    name = "measured"

    def __init__(self, candidates: Sequence[AttentionBackend], table: Table) -> None:
        self.candidates = candidates
        self.table = table
        self._chosen: dict[tuple[object, ...], AttentionBackend] = {}

    def refuses(self, device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
        return None if device == self.table.device else f"it has measured {self.table.device}"

    def packed(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, options: AttentionOptions) -> Tensor:
        length = round_length(rows.longest)
        case = (query.dtype, *query.shape[1:], key.shape[1], describe(options), length)
        backend = self._chosen.get(case)
        if backend is None:
            backend = self._chosen[case] = self._choose(query, key, options, length)
        return backend.packed(query, key, value, rows, options)

    def able(
        self, dtype: torch.dtype, dim: int, options: AttentionOptions, device: torch.device
    ) -> list[AttentionBackend]:
        """The candidates that claim this kind of attention, and have shown it.

        The reference only where there is no other: it goes row by row, and torch's choice behind it may be a library
        that prepares a plan for every length it has not seen.
        """
        claiming = [backend for backend in self.candidates if backend.claims(options)]
        shown = [backend for backend in claiming if try_packed(backend, device, dtype, dim, options) is None]
        return [backend for backend in shown if not isinstance(backend, SdpaAttention)] or shown

    def _choose(self, query: Tensor, key: Tensor, options: AttentionOptions, length: int) -> AttentionBackend:
        heads, dim = query.shape[1:]
        able = self.able(query.dtype, dim, options, query.device)
        if len(able) == 1:
            return able[0]
        chosen = self.table.choose(Case(query.dtype, dim, heads, key.shape[1], options, length), able)
        log.info("attention of %s tokens, %s: %s", length, describe(options), chosen.name)
        return chosen


def choose_packed(
    backends: Iterable[AttentionBackend], device: torch.device, dtype: torch.dtype, dim: int
) -> AttentionBackend:
    """What attends inside packed rows: the only backend that can, or the fastest of several in each case."""
    candidates: list[AttentionBackend] = []
    for backend in (*backends, SdpaAttention()):
        known = {type(each).packed for each in candidates}  # one that pages in its own way may pack like another
        if type(backend).packed not in known and explain_refusal(backend, device, dtype, dim) is None:
            candidates.append(backend)
    return candidates[0] if len(candidates) == 1 else MeasuredAttention(candidates, Table(device))
