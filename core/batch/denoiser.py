"""What a modality supplies to the denoise family: a model over rows at different timesteps.

A `DenoiseModel` is a black box. A `BlockModel` is a transformer that can be walked in four parts, so that a row can
reuse what an earlier step left behind in place of most of its blocks (`core.cache.stepcache`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from polymux.core.batch.trajectory import DenoiseRequest, DenoiseRow
from polymux.core.compute.replay import Replay
from polymux.core.errors import InternalError


@dataclass(frozen=True)
class DenoiseBatch:
    """The input of one pass: P rows, every branch of every request in turn, all of one group."""

    latents: Tensor
    """(P, *shape) float32, scaled for the model."""
    timesteps: Tensor
    """(P,) float32, in the scheduler's own units."""
    conditions: Sequence[Mapping[str, Tensor]]
    """Per row."""
    expert: int = 0
    """Which of its experts the model runs, where it has several."""

    def gather(self, name: str) -> Tensor:
        """One condition of all rows: (P, ...)."""
        return torch.stack([condition[name] for condition in self.conditions])

    def select(self, rows: Sequence[int]) -> DenoiseBatch:
        """Some of the rows, in the order given."""
        if len(rows) == len(self.conditions):
            return self
        conditions = [self.conditions[row] for row in rows]
        return replace(
            self,
            latents=take_rows(self.latents, rows),
            timesteps=take_rows(self.timesteps, rows),
            conditions=conditions,
        )


class Adapters(Protocol):
    """The low-rank changes of a model, one set of them at a time."""

    @property
    def bound(self) -> bool:
        """Whether any is in force."""

    def bind(self, weights: Tensor | None) -> None:
        """From now on the model is changed by this adapter's block, (size,), or by none."""


class DenoiseModel(ABC):
    """Predictions for rows at different timesteps, and what must agree for rows to share a pass."""

    adapters: Adapters | None = None
    """What a request may choose from to change its passes; None: nothing."""

    def adapt(self, weights: Tensor | None) -> None:
        """The next passes are changed by an adapter, or by none. Raises `InternalError` for a model without any."""
        if self.adapters is not None:
            self.adapters.bind(weights)
        elif weights is not None:
            raise InternalError("this model was loaded without adapters")

    @abstractmethod
    def forward(self, batch: DenoiseBatch) -> Tensor:
        """The model's predictions (noise, velocity, sample: what the scheduler expects), (P, *shape)."""

    def group(self, row: DenoiseRow) -> Hashable:
        """What must be equal for two rows to share their next pass: resolution, text length, expert, adapter."""
        condition = row.request.conditions[0]
        expert = self.expert(row.request, row.next_step)
        return (row.request.shape, expert, *(value.shape for value in condition.values()))

    def expert(self, request: DenoiseRequest, step: int) -> int:
        """Which expert takes that step of the request (counted from its first one)."""
        return 0

    def size(self, request: DenoiseRequest) -> int:
        """Units of work in one branch of one step: tokens of a transformer."""
        return prod(request.shape[1:])

    def combine(self, request: DenoiseRequest, predictions: Tensor) -> Tensor:
        """The prediction of a request, (1, *shape), from those of its branches, (branches, *shape)."""
        if len(predictions) == 1:
            return predictions
        with_prompt, without = predictions[:1], predictions[1:]
        return without + request.scale * (with_prompt - without)


@dataclass(frozen=True)
class Streams:
    """What flows through a transformer's blocks: P rows of T picture tokens, and what goes with them."""

    hidden: Tensor
    """(P, T, dim): the picture's tokens."""
    beside: Mapping[str, Tensor]
    """Per row, (P, ...): the text's tokens, the modulation by timestep and guidance."""
    shared: Any = None
    """The same for all rows of a group: rotary tables, the grid."""

    def select(self, rows: Sequence[int]) -> Streams:
        """Some of the rows, in the order given."""
        if list(rows) == list(range(len(self.hidden))):
            return self
        beside = {name: take_rows(value, rows) for name, value in self.beside.items()}
        return replace(self, hidden=take_rows(self.hidden, rows), beside=beside)

    def join(self, other: Streams) -> Streams:
        """The rows of both."""
        beside = {name: torch.cat([value, other.beside[name]]) for name, value in self.beside.items()}
        return replace(self, hidden=torch.cat([self.hidden, other.hidden]), beside=beside)


class Wrap(Protocol):
    """Makes what stands in a merged model for `layer`, which computes the outputs of `parts` side by side."""

    def __call__(self, layer: torch.nn.Module, *parts: torch.nn.Module) -> torch.nn.Module: ...


def keep_layer(layer: torch.nn.Module, *parts: torch.nn.Module) -> torch.nn.Module:
    """No adapter changes anything."""
    return layer


class BlockModel(DenoiseModel):
    """A transformer in four parts: `finish(body(head(embed(batch))))`. The blocks keep the hidden tokens' shape, so a
    row may leave out the body, or head and body, and add a saved residual instead."""

    dim: int
    """Width of a hidden token."""
    dtype: torch.dtype
    """Of hidden tokens, and of what is saved of them."""
    replay: Replay | None = None
    """Whole passes as recorded graphs, see `record`."""

    def forward(self, batch: DenoiseBatch) -> Tensor:
        if self.replay is None or (self.adapters is not None and self.adapters.bound):
            return self.finish(self.body(self.head(self.embed(batch))))
        names = tuple(batch.conditions[0])
        values = [condition[name] for condition in batch.conditions for name in names]
        return self.replay.run((names, batch.expert), [batch.latents, batch.timesteps, *values])

    def record(self) -> None:
        """From now on, passes of shapes that come again are replayed. Only on CUDA."""
        self.replay = Replay(self._step)

    def _step(self, key: Any, inputs: Sequence[Tensor]) -> Tensor:
        names, expert = key
        latents, timesteps, *values = inputs
        conditions = [dict(zip(names, values[at : at + len(names)])) for at in range(0, len(values), len(names))]
        return self.finish(self.body(self.head(self.embed(DenoiseBatch(latents, timesteps, conditions, expert)))))

    def merge(self, wrap: Wrap = keep_layer) -> Sequence[torch.nn.Module]:
        """Bring the model into the form that runs fastest, and give the blocks that repeat: what is worth compiling.
        Predictions stay the same; the model's own modules may be gone. `wrap` is asked about every layer that takes
        others' place, before that."""
        return ()

    @abstractmethod
    def tokens(self, request: DenoiseRequest) -> int:
        """Picture tokens of a request: T."""

    @abstractmethod
    def embed(self, batch: DenoiseBatch) -> Streams:
        """The input of the first block."""

    @abstractmethod
    def head(self, streams: Streams) -> Streams:
        """The first block."""

    @abstractmethod
    def body(self, streams: Streams) -> Streams:
        """All other blocks."""

    @abstractmethod
    def finish(self, streams: Streams) -> Tensor:
        """Predictions from the last block's output: (P, *shape)."""

    @abstractmethod
    def modulate(self, streams: Streams) -> Tensor:
        """The first block's input as its attention sees it, normalised and modulated by the timestep: (P, T, dim)."""


def take_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows of (P, ...), in the order given. Never waits for the device, whose index would be an upload."""
    return torch.cat([tensor[row : row + 1] for row in rows])


def split_rows(tensor: Tensor) -> list[Tensor]:
    """The rows of (P, ...), each (1, ...)."""
    return [tensor[row : row + 1] for row in range(len(tensor))]
