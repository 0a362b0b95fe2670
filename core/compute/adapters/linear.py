"""A linear layer that adds, to the tokens that have an adapter, what the adapter says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.functional import linear

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
                part += linear(linear(adapted, place.down(tokens.weights)), place.up(tokens.weights))
        return out
