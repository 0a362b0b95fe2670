"""Logit rules: what a row may sample next, as data that travels with the row.

A rule is an immutable object that many rows share. It is a pure function over the rows of a launch that carry it,
on the device: which token comes next depends on tokens that the host has not seen yet. What it must remember of a
row is a vector of `width` integers in the row's slot:

    begin      the state before anything is generated
    apply      logits and states -> logits
    advance    states and the tokens just drawn -> states
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from polymux.core.compute.device import send

Choose = Callable[[Tensor, Tensor, Sequence[Tensor]], tuple[Tensor, Tensor, Tensor]]
"""(logits (R, vocabulary), slots (R,), the states of each rule by slot) -> the likeliest tokens (R,) under the rules,
whether each row's logits were finite (R,), and the tokens' logprobs (R,). Advances the states."""


class LogitRule(ABC):
    """One rule. Rows of one launch carry equal rules or different ones; each sees only the rows that carry it."""

    width = 0
    """Integers it remembers of each row."""

    def begin(self) -> Sequence[int]:
        """The state of a row that has generated nothing: `width` integers."""
        return ()

    @abstractmethod
    def apply(self, logits: Tensor, states: Tensor) -> Tensor:
        """New logits (R, vocabulary) from float32 logits and the int64 states (R, width) before this token."""

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The states after the tokens (R,) were drawn."""
        return states

    def fuse(self, before: Sequence[LogitRule], vocabulary: int, device: torch.device) -> Choose | None:
        """The likeliest tokens under the rules `before` and this one, in one pass where the device has it."""
        return None

    def replay(self, generated: Sequence[int], device: torch.device) -> Tensor:
        """The state (1, width) of a row that has generated these tokens: a preempted row comes back with it."""
        states = send(np.array([list(self.begin())], np.int64), device)
        tokens = send(np.array(generated, np.int64), device)
        for place in range(len(generated)):
            states = self.advance(states, tokens[place : place + 1])
        return states


class Suppress(LogitRule):
    """Never these tokens."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = tuple(sorted(ids))
        self._ids = torch.tensor(self.ids, dtype=torch.int64)

    def apply(self, logits: Tensor, states: Tensor) -> Tensor:
        return logits.index_fill(1, self._on(logits), float("-inf"))

    def _on(self, logits: Tensor) -> Tensor:
        if self._ids.device != logits.device:
            self._ids = send(self._ids.cpu().numpy(), logits.device)
        return self._ids


class SuppressFirst(Suppress):
    """These tokens may not be the first that is generated."""

    width = 1

    def begin(self) -> Sequence[int]:
        return (1,)

    def apply(self, logits: Tensor, states: Tensor) -> Tensor:
        return torch.where(states.bool(), super().apply(logits, states), logits)

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        return torch.zeros_like(states)


class Only(Suppress):
    """Nothing but these tokens."""

    def apply(self, logits: Tensor, states: Tensor) -> Tensor:
        ids = self._on(logits)
        return torch.full_like(logits, float("-inf")).index_copy(1, ids, logits.index_select(1, ids))
