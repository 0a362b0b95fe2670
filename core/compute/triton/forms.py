"""In what tiles many queries attend: how large, by how many warps, and how many are on their way at once."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


class Form(NamedTuple):
    """How a tile is computed."""

    rows: int
    """Queries, each head's counted."""
    tile: int
    """Keys taken at a time."""
    warps: int
    stages: int
    """Tiles of keys that are on their way at once."""
    registers: int | None = None
    """Of a thread, at most."""


THREE_STAGES = 136 << 10
"""Bytes that a program needs for three tiles of keys and values at once, beside its queries."""


@lru_cache
def can_hold(device: torch.device, size: int) -> bool:
    """Whether a program may have so many bytes of shared memory."""
    return device.type == "cuda" and torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= size


def choose_form(tokens: int, pack: int, wide: int, itemsize: int, deep: bool = False) -> Form:
    """Two programs share a multiprocessor: one computes its softmax while the other multiplies. That is worth more
    than registers, of which 128 a thread are left.

    TFLOP/s on an H200, 32 query heads on 8 of 128, causal, in blocks: 391 for a prompt of 2,016 tokens and 442 for
    4,064 (without the bound 318 and 353; tiles of 128 keys 266 and 315; flash 156 and 231, cuDNN 262 and 403).
    `deep` is for keys in blocks: with a third tile on its way one program has a multiprocessor for itself, which gives
    386 where two give 375 and 446 where they give 427, 400 in place of 364 behind a prefix of 2,048, 220 in place of
    216 for prompts of 560; packed texts of 128 tokens lose a quarter.
    """
    if itemsize > 2:
        return Form(64, 32, 8, 2)
    if wide > 128:
        return Form(64, 64, 8, 2)
    if tokens * pack <= 64:
        return Form(64, 64, 4, 2)
    return Form(128, 64, 8, 3 if wide <= 64 or deep else 2, 128)
