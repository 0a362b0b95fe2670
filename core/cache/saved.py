"""What rows keep on the device between denoising steps: hidden tokens in blocks of a cache class, and derivatives.

A row's tokens are spread over blocks like the keys and values of a decoder, so that rows of any resolution share the
arena, and a row that cannot get its blocks waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from polymux.core.cache.arena import Arena
from polymux.core.cache.blocks import CacheSpec, view_blocks
from polymux.core.cache.stepcache import StepCache, StepRule
from polymux.core.errors import InternalError

PAGE = 64
"""Tokens of one block."""

SIGNAL = 0
"""The plane that holds what an adaptive rule compares the next step with."""

RESIDUAL = -1
"""The plane, counted from the end, that holds what a skipped step adds."""


def saved_tokens(name: str, dim: int, dtype: torch.dtype) -> CacheSpec:
    """The cache class of saved hidden tokens: (PAGE, dim)."""
    return CacheSpec(name, (PAGE, dim), dtype, PAGE)


class Saved:
    """What one (request, branch) keeps between steps, and its decisions.

    `places` are the blocks and offsets of its tokens in the cache class, plane by plane; `factors` the derivatives
    of its outputs as of step `updated`.
    """

    def __init__(self, rule: StepRule, steps: int, tokens: int, branch: int) -> None:
        self.cache = StepCache(rule, steps)
        self.tokens = tokens
        self.first = branch * rule.planes * tokens
        """Of its units among the row's."""
        self.places: tuple[Tensor, Tensor] | None = None
        self.factors: list[Tensor] = []
        self.updated = -1
        self.measured: dict[int, Tensor] = {}
        """By step, what `StepProbe` saw since the step before, (3,) float32: how large the residual is relative to
        that one's, and how far the modulated input and the residual have moved."""

    @property
    def rule(self) -> StepRule:
        return self.cache.rule

    @property
    def units(self) -> int:
        return self.rule.planes * self.tokens

    def locate(self, blocks: Sequence[int], device: torch.device) -> None:
        """Remember where the row's blocks are. Once per row."""
        if self.places is None and self.units:
            units = torch.arange(self.first, self.first + self.units)
            self.places = (torch.tensor(blocks)[units // PAGE].to(device), (units % PAGE).to(device))

    def plane(self, number: int) -> tuple[Tensor, Tensor]:
        if self.places is None:
            raise InternalError("a step cache was used before its blocks were known")
        span = slice(number * self.tokens, (number + 1) * self.tokens)
        return self.places[0][span], self.places[1][span]

    # ---- extrapolation of outputs ----

    def expand(self, output: Tensor, step: int, order: int) -> None:
        """Take a computed output, (*shape), into the Taylor expansion: divided differences up to `order`."""
        if self.updated == step:
            return
        factors = [output]
        for number, before in enumerate(self.factors[:order]):
            factors.append((factors[number] - before) / (step - self.updated))
        self.factors, self.updated = factors, step

    def extrapolate(self, step: int) -> Tensor:
        """The output that the expansion predicts for a later step: (*shape)."""
        offset = step - self.updated
        terms = [factor * (offset**order / math.factorial(order)) for order, factor in enumerate(self.factors)]
        return torch.stack(terms).sum(0)


class SavedTokens:
    """The device side of the cache class: planes of many rows at once."""

    def __init__(self, arena: Arena, spec: CacheSpec) -> None:
        self._view = view_blocks(arena, spec)

    def read(self, rows: Sequence[Saved], plane: int) -> Tensor:
        """(R, tokens, dim)."""
        blocks, offsets = self._index(rows, plane)
        return self._view[blocks, offsets].view(len(rows), rows[0].tokens, -1)

    def write(self, rows: Sequence[Saved], plane: int, values: Tensor) -> None:
        """`values`: (R, tokens, dim)."""
        self._view[self._index(rows, plane)] = values.flatten(0, 1)

    @staticmethod
    def _index(rows: Sequence[Saved], plane: int) -> tuple[Tensor, Tensor]:
        pairs = [row.plane(plane if plane >= 0 else row.rule.planes + plane) for row in rows]
        return torch.cat([blocks for blocks, _ in pairs]), torch.cat([offsets for _, offsets in pairs])
