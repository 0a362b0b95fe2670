"""Encoders of tiles: pictures of one size, each of which becomes a fixed number of vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polymux.core.batch.encode import Encoder
from polymux.core.cache.blocks import CacheSpec
from polymux.core.errors import InvalidRequest, PolymuxError
from polymux.modalities.vision.scale import PixelScale
from polymux.modalities.vision.work import Item

See = Callable[[Tensor], Tensor]
"""(tiles, 3, side, side) to (tiles, vectors, dim)."""


class TileEncoder(Encoder):
    """One tile an item (Idefics3, SmolVLM, LLaVA)."""

    def __init__(self, see: See, scale: PixelScale, side: int, vectors: int, dim: int, dtype: torch.dtype) -> None:
        self.see = see
        self.scale = scale
        self.side = side
        self.vectors = vectors
        self.dim = dim
        self.inlay = CacheSpec("tiles", (vectors, dim), dtype, 1)

    def count(self, item: Item) -> int:
        return self.vectors

    def forward(self, items: list[Item]) -> list[Tensor | PolymuxError]:
        return list(self.run(items))

    def run(self, items: list[Item]) -> Tensor:
        """(tiles, vectors, dim) of all items' tiles."""
        pixels = torch.cat([self.scale.apply(item.pixels) for item in items])
        return self.see(pixels.permute(0, 3, 1, 2).contiguous())

    def check(self, item: Item) -> None:
        """Raises `InvalidRequest` for what the encoder does not take."""
        self._check(item, 1)

    def _check(self, item: Item, least: int, most: int = 1) -> None:
        tiles, *shape = item.pixels.shape
        if shape != [self.side, self.side, 3] or not least <= tiles <= most:
            raise InvalidRequest(f"tiles of shape {item.pixels.shape} are not ({self.side}, {self.side}, 3) each")


Pack = Callable[[list[Tensor], list[tuple[int, int]]], list[Tensor]]
"""Per picture, the vectors of its tiles and its size, to its vectors."""

MOST_TILES = 64


class AnyresEncoder(TileEncoder):
    """A picture of any size an item: the whole first, then its tiles, whose vectors are put together again (LLaVA-NeXT
    and OneVision)."""

    def __init__(self, see: See, pack: Pack, scale: PixelScale, side: int, vectors: int, dim: int, dtype: Any) -> None:
        super().__init__(see, scale, side, vectors, dim, dtype)
        self.pack = pack

    def count(self, item: Item) -> int:
        return sum(item.counts)

    def forward(self, items: list[Item]) -> list[Tensor | PolymuxError]:
        parts = list(self.run(items).split([len(item.pixels) for item in items]))
        return list(self.pack(parts, [item.size for item in items]))

    def check(self, item: Item) -> None:
        self._check(item, 1, MOST_TILES)
