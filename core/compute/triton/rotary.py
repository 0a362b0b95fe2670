"""Norms on heads and rotary, from a merged projection: in place, or with keys and values written into blocks.

rotate_heads   queries and keys are turned where they stand (rows that see only themselves)
rotate_write   queries into a tensor of their own, keys and values into their blocks (rows that read blocks)
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from polymux.core.compute.attention import PagedBatch
from polymux.core.compute.triton.jit import kernel

TOGETHER = 8
"""Heads of one token that a program rotates: one each would be more programs than a card starts in the time."""


@kernel()
def _rotate(
    merged,
    query,
    cache,
    cosines,
    sines,
    turns,
    q_weight,
    k_weight,
    tables,
    slots,
    positions,
    token_stride,
    table_stride,
    block_stride,
    value_stride,
    place_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """BLOCK: tokens of a block; 0: in place, and values are not looked at."""
    token = tl.program_id(0).to(tl.int64)
    if BLOCK > 0:
        position = tl.load(positions + token)
        if position < 0:
            return
    head = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    half = tl.arange(0, HALF)
    inside = half < DIM // 2
    moved: tl.constexpr = HEADS + KV_HEADS * (2 if BLOCK > 0 else 1)
    mask = (head < moved)[:, None] & inside[None, :]
    source = merged + token * token_stride + head[:, None] * DIM + half[None, :]
    first = tl.load(source, mask, other=0.0).to(tl.float32)
    second = tl.load(source + DIM // 2, mask, other=0.0).to(tl.float32)
    normed_first, normed_second = first, second
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / DIM + eps)[:, None]
        asks = (head < HEADS)[:, None]
        q_first = tl.load(q_weight + half, inside, other=0.0).to(tl.float32)[None, :]
        q_second = tl.load(q_weight + DIM // 2 + half, inside, other=0.0).to(tl.float32)[None, :]
        k_first = tl.load(k_weight + half, inside, other=0.0).to(tl.float32)[None, :]
        k_second = tl.load(k_weight + DIM // 2 + half, inside, other=0.0).to(tl.float32)[None, :]
        normed_first = first * scale * tl.where(asks, q_first, k_first)
        normed_second = second * scale * tl.where(asks, q_second, k_second)
    turn = tl.load(turns + token) * DIM
    cos = tl.load(cosines + turn + half, inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sines + turn + half, inside, other=0.0).to(tl.float32)[None, :]
    turned_first = normed_first * cos - normed_second * sin
    turned_second = normed_second * cos + normed_first * sin
    if BLOCK == 0:
        tl.store(source, turned_first.to(merged.dtype.element_ty), mask)
        tl.store(source + DIM // 2, turned_second.to(merged.dtype.element_ty), mask)
    else:
        rotated = (head < HEADS + KV_HEADS)[:, None]
        first = tl.where(rotated, turned_first, first)
        second = tl.where(rotated, turned_second, second)
        block = tl.load(tables + tl.load(slots + token) * table_stride + position // BLOCK)
        place = block * block_stride + (position % BLOCK) * place_stride
        values = value_stride + (head - HEADS - KV_HEADS) * DIM
        place += tl.where(head < HEADS + KV_HEADS, (head - HEADS) * DIM, values)
        own = query + (token * HEADS + head)[:, None] * DIM + half[None, :]
        asked = mask & (head < HEADS)[:, None]
        tl.store(own, first.to(query.dtype.element_ty), asked)
        tl.store(own + DIM // 2, second.to(query.dtype.element_ty), asked)
        kept = cache + place[:, None] + half[None, :]
        written = mask & (head >= HEADS)[:, None]
        tl.store(kept, first.to(cache.dtype.element_ty), written)
        tl.store(kept + DIM // 2, second.to(cache.dtype.element_ty), written)


Turning = tuple[Tensor, Tensor]
"""A table of cosines and sines, (2, rows, dim), and which of its rows each token has, (T,)."""

Weights = tuple[Tensor, Tensor, float]
"""Of the norms on queries and on keys, (dim,) each, and their epsilon."""


def rotate_heads(merged: Tensor, heads: int, kv_heads: int, turning: Turning, norms: Weights | None) -> None:
    """Norms and rotary on the queries and keys of a merged projection (T, heads + 2 kv heads, dim), in place."""
    _launch(merged, merged, heads, kv_heads, turning, norms, None, None)


def rotate_write(
    merged: Tensor,
    heads: int,
    kv_heads: int,
    turning: Turning,
    norms: Weights | None,
    cache: Tensor,
    batch: PagedBatch,
) -> Tensor:
    """From the merged projection (T, heads + 2 kv heads, dim): norms and rotary on queries and keys; keys and values
    go to their blocks of `cache` (blocks, 2, block, kv heads, dim); the queries, (T, heads, dim), are returned."""
    query = merged.new_empty(merged.shape[0], heads, merged.shape[2])
    _launch(merged, query, heads, kv_heads, turning, norms, cache, batch)
    return query


def _launch(
    merged: Tensor,
    query: Tensor,
    heads: int,
    kv_heads: int,
    turning: Turning,
    norms: Weights | None,
    cache: Tensor | None,
    batch: PagedBatch | None,
) -> None:
    tokens, _, dim = merged.shape
    rotary, turns = turning
    q_weight, k_weight, eps = norms if norms is not None else (merged, merged, 0.0)
    moved = heads + kv_heads * (1 if batch is None else 2)
    _rotate[(tokens, triton.cdiv(moved, TOGETHER))](
        merged,
        query,
        merged if cache is None else cache,
        rotary[0],
        rotary[1],
        turns,
        q_weight,
        k_weight,
        turns if batch is None else batch.tables,
        turns if batch is None else batch.token_slots,
        turns if batch is None else batch.positions,
        merged.stride(0),
        0 if batch is None else batch.tables.stride(0),
        *((0, 0, 0) if cache is None else cache.stride()[:3]),
        eps,
        heads,
        kv_heads,
        dim,
        triton.next_power_of_2(dim // 2),
        0 if batch is None else batch.block,
        norms is not None,
        TOGETHER,
        num_warps=4,
    )
