"""Pooling: the hidden states of packed texts to one vector each, all texts at once and without waiting for a device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polymux.core.compute.body import PackedTexts

Pool = Callable[[Tensor, PackedTexts], Tensor]
"""Hidden states (T, d) to float32 vectors (texts, d)."""


def _reduce(hidden: Tensor, texts: PackedTexts, how: str) -> Tensor:
    return torch.segment_reduce(hidden.float(), how, offsets=texts.starts, axis=0, unsafe=True)


def _weigh(hidden: Tensor, texts: PackedTexts) -> Tensor:
    """The mean in which later tokens weigh more (SGPT, Muennighoff 2022)."""
    weights = (texts.places + 1).float()[:, None]
    return _reduce(hidden.float() * weights, texts, "sum") / _reduce(weights, texts, "sum")


POOLS: dict[str, Pool] = {
    "cls": lambda hidden, texts: hidden[texts.starts[:-1]].float(),
    "last": lambda hidden, texts: hidden[texts.starts[1:] - 1].float(),
    "max": lambda hidden, texts: _reduce(hidden, texts, "max"),
    "mean": lambda hidden, texts: _reduce(hidden, texts, "mean"),
    "mean_sqrt_len": lambda hidden, texts: _reduce(hidden, texts, "sum") / texts.starts.diff().sqrt()[:, None],
    "weightedmean": _weigh,
}
