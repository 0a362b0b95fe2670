"""A linear layer that adds, to the tokens that have an adapter, what the adapter says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from polymux.core.compute.cpu.kernels import load_cpu_kernels

if TYPE_CHECKING:
    from polymux.core.compute.adapters.layout import AdaptedLaunch


@dataclass(frozen=True)
class Place:
    """Where the two matrices for one linear layer lie in an adapter's block."""

    first: int
    rank: int
    inputs: int
    outputs: int

    @property
    def end(self) -> int:
        return self.first + self.rank * (self.inputs + self.outputs)

    def down(self, block: Tensor) -> Tensor:
        """(rank, inputs) of a block."""
        return block[self.first : self.first + self.rank * self.inputs].view(self.rank, self.inputs)

    def up(self, block: Tensor) -> Tensor:
        """(outputs, rank) of a block."""
        return block[self.first + self.rank * self.inputs : self.end].view(self.outputs, self.rank)


class AdaptedLinear(nn.Module):
    """`base`, of any kind (quantized, fused), whose outputs from `first` on belong to the layer that `place` is for."""

    def __init__(self, base: nn.Module, pieces: Sequence[tuple[int, Place]], launch: AdaptedLaunch) -> None:
        super().__init__()
        self.base = base
        self._pieces = tuple(pieces)
        self._launch = launch

    def forward(self, x: Tensor) -> Tensor:
        """(..., T, in) to (..., T, out), T the tokens of the launch."""
        out: Tensor = self.base(x)
        for tokens in self._launch.tokens:
            adapted = x[..., tokens.start : tokens.end, :]
            for first, place in self._pieces:
                part = out[..., tokens.start : tokens.end, first : first + place.outputs]
                _add(part, adapted, place.down(tokens.weights), place.up(tokens.weights))
        return out


def _add(out: Tensor, x: Tensor, down: Tensor, up: Tensor) -> None:
    """out += x @ down.T @ up.T; in float32 on a CPU a row's bits do not depend on its neighbours."""
    kernels = load_cpu_kernels() if x.device.type == "cpu" and x.dtype == out.dtype == torch.float32 else None
    if kernels is None:
        out += linear(linear(x, down), up)
    elif x.dim() > 2:
        for into, rows in zip(out, x, strict=True):
            _add(into, rows, down, up)
    else:
        kernels.add_low_rank(out, x.contiguous(), down, up)
