"""How frames of codes lie in a token sequence, and what may come next there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polymux.core.batch.sequence import TokenRow
from polymux.core.compute.rules import LogitRule


class FrameLayout(ABC):
    """`tokens`: how many a frame takes."""

    tokens: int
    rules: tuple[LogitRule, ...] = ()
    stop_ids: frozenset[int] = frozenset()

    @abstractmethod
    def read(self, row: TokenRow) -> list[list[int]]:
        """The whole frames that a row has generated, without what ended it."""


class DeepFrames(FrameLayout):
    """A token is a frame's first code, and a depth model adds the others."""

    tokens = 1

    def read(self, row: TokenRow) -> list[list[int]]:
        frames = [[token, *further] for token, further in zip(row.generated, row.further)]
        return frames[:-1] if row.reason == "stop" else frames


@dataclass(frozen=True)
class FlatSpan:
    """Where a plain language model has its codes: id = first + codebook * size + code."""

    first: int
    codebooks: int
    size: int
    end: int
    """The id that ends the sound."""


class FlatFrames(FrameLayout):
    """A frame's codes one after the other, each codebook with ids of its own."""

    def __init__(self, span: FlatSpan) -> None:
        self.span = span
        self.tokens = span.codebooks
        self.rules = (Lanes(span),)
        self.stop_ids = frozenset([span.end])

    def read(self, row: TokenRow) -> list[list[int]]:
        span = self.span
        spoken = row.generated[:-1] if row.reason == "stop" else row.generated
        whole = len(spoken) // span.codebooks * span.codebooks
        codes = [(token - span.first) % span.size for token in spoken[:whole]]
        return [codes[start : start + span.codebooks] for start in range(0, whole, span.codebooks)]


class Lanes(LogitRule):
    """Each place of a frame takes codes of its own codebook; only between frames the sound may end, and not before the
    first. A stray id would shift everything after it into the wrong codebooks."""

    width = 1

    def __init__(self, span: FlatSpan) -> None:
        self._span = span

    def begin(self) -> Sequence[int]:
        return (0,)

    def apply(self, logits: Tensor, states: Tensor) -> Tensor:
        span = self._span
        ids = torch.arange(logits.shape[1], device=logits.device) - span.first
        lane = states % span.codebooks
        allowed = (ids >= 0) & (ids // span.size == lane)
        allowed = allowed | ((ids == span.end - span.first) & (lane == 0) & (states > 0))
        return logits.masked_fill(~allowed, float("-inf"))

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        return states + 1
