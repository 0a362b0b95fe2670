"""How frames of codes lie in a token sequence, and what may come next there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polymux.core.batch.sequence import TokenRow
from polymux.core.compute.rules import LogitRule


class FrameLayout(ABC):
    """`tokens`: how many a frame takes. `codebooks`: codes of a frame."""

    tokens: int
    codebooks: int
    rules: tuple[LogitRule, ...] = ()
    stop_ids: frozenset[int] = frozenset()

    @abstractmethod
    def read(self, row: TokenRow, first: int) -> np.ndarray:
        """The whole frames that a row has generated, from number `first` on and without what ended it: (frames,
        codebooks) int64."""


class DeepFrames(FrameLayout):
    """A token is a frame's first code, and a depth model adds the others."""

    tokens = 1

    def __init__(self, codebooks: int) -> None:
        self.codebooks = codebooks

    def read(self, row: TokenRow, first: int) -> np.ndarray:
        tokens = row.tokens[row.prompt_length + first :]
        frames = [[token, *further] for token, further in zip(tokens, row.further[first:])]
        return np.array(frames[:-1] if row.reason == "stop" else frames, np.int64).reshape(-1, self.codebooks)


@dataclass(frozen=True)
class FlatSpan:
    """Where a plain language model has its codes: id = first + place in the frame * size + code."""

    first: int
    codebooks: int
    """Codes of a frame; a codec of several rates has more of them than codebooks."""
    size: int
    end: int
    """The id that ends the sound."""


class FlatFrames(FrameLayout):
    """A frame's codes one after the other, each codebook with ids of its own."""

    def __init__(self, span: FlatSpan) -> None:
        self.span = span
        self.tokens = self.codebooks = span.codebooks
        self.rules = (Lanes(span),)
        self.stop_ids = frozenset([span.end])

    def read(self, row: TokenRow, first: int) -> np.ndarray:
        span = self.span
        spoken = np.array(row.tokens[row.prompt_length + first * span.codebooks :], np.int64)
        if row.reason == "stop":
            spoken = spoken[:-1]
        whole = len(spoken) // span.codebooks * span.codebooks
        return ((spoken[:whole] - span.first) % span.size).reshape(-1, span.codebooks)


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
