"""Rotary position embedding of an encoder's queries and keys, in place."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from polymux.core.compute.triton.jit import kernel


@kernel()
def _turn(merged, cosines, sines, HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, ROWS)[:, None]
    half = tl.arange(0, HALF)[None, :]
    mask = (heads < 2 * HEADS) & (half < DIM // 2)
    turns = token * DIM + half
    known = half < DIM // 2
    first_cos = tl.load(cosines + turns, known, other=0.0)
    first_sin = tl.load(sines + turns, known, other=0.0)
    second_cos = tl.load(cosines + turns + DIM // 2, known, other=0.0)
    second_sin = tl.load(sines + turns + DIM // 2, known, other=0.0)
    place = merged + (token * 3 * HEADS + heads) * DIM + half
    first = tl.load(place, mask, other=0.0).to(tl.float32)
    second = tl.load(place + DIM // 2, mask, other=0.0).to(tl.float32)
    tl.store(place, (first * first_cos - second * first_sin).to(merged.dtype.element_ty), mask)
    tl.store(place + DIM // 2, (second * second_cos + first * second_sin).to(merged.dtype.element_ty), mask)


def turn(merged: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Queries and keys of (T, 3, heads, dim), contiguous, turn by (T, dim) float32; values stay."""
    tokens, _, heads, dim = merged.shape
    rows, half = triton.next_power_of_2(2 * heads), triton.next_power_of_2(dim // 2)
    _turn[(tokens,)](merged, cosines, sines, heads, dim, rows, half, num_warps=4)
