"""A prefix that all rows of a decode step have in common, read once for all of them (cascade attention; Juravsky et
al., Hydragen, 2024)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from polymux.core.compute.attention import AttentionOptions
from polymux.core.compute.triton.jit import kernel
from polymux.core.compute.triton.softmax import fold, load_tile, score

STRETCHES = 8
"""Stretches of the prefix, each read by programs of its own."""


@kernel()
def _read_prefix(
    query,
    cache,
    partial,
    tables,
    slots,
    prefix,
    scale,
    rows,
    table_stride,
    block_stride,
    value_stride,
    token_stride,
    head_stride,
    parts,
    STRETCHES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    kv_head = tl.program_id(0)
    stretch = tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    length = tl.load(prefix)
    share = tl.cdiv(tl.cdiv(length, STRETCHES), TILE) * TILE
    first = stretch * share
    last = tl.minimum(first + share, length)
    which = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    row = (which // group).to(tl.int64)
    head = kv_head * group + which % group
    here = row < rows
    dims = tl.arange(0, WIDE)
    fits = dims < DIM
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDE], tl.float32)
    if first < last:
        where_q = (row * HEADS + head)[:, None] * DIM + dims[None, :]
        q = tl.load(query + where_q, here[:, None] & fits[None, :], other=0.0)
        table = tables + tl.load(slots) * table_stride
        base = cache + kv_head * head_stride + dims[None, :]
        for start in range(first, last, TILE):
            places = start + tl.arange(0, TILE)
            seen = places < last
            keys, values = load_tile(base, table, places, seen, fits, block_stride, value_stride, token_stride, BLOCK)
            scores = tl.where(seen[None, :], score(q, keys, scale, SOFTCAP), float("-inf"))
            peak, total, mixed = fold(peak, total, mixed, scores, values)
    target = partial + ((row * HEADS + head) * parts + stretch) * (DIM + 2)
    tl.store(target[:, None] + dims[None, :], mixed, here[:, None] & fits[None, :])
    tl.store(target + DIM, peak, here)
    tl.store(target + DIM + 1, total, here)


def attend_prefix(
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    slots: Tensor,
    prefix: Tensor,
    block: int,
    options: AttentionOptions,
    partial: Tensor,
) -> None:
    """(R, heads, dim) queries over the first `prefix` tokens, the same for all rows, into the first `STRETCHES` parts
    of `partial` (R, heads, parts, dim + 2): sums, peaks and totals that are still to be joined.

    No row's own position matters: all of them stand behind the prefix.
    """
    rows, heads, dim = query.shape
    kv_heads = cache.shape[3]
    wide = triton.next_power_of_2(dim)
    mine = rows * heads // kv_heads
    queries = min(128 if wide <= 128 else 64, max(16, triton.next_power_of_2(mine)))
    _read_prefix[(kv_heads, STRETCHES, triton.cdiv(mine, queries))](
        query,
        cache,
        partial,
        tables,
        slots,
        prefix,
        options.scale,
        rows,
        tables.stride(0),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        cache.stride(3),
        partial.shape[2],
        STRETCHES,
        heads,
        kv_heads,
        dim,
        wide,
        block,
        queries,
        64,
        options.softcap or 0.0,
        num_warps=8 if queries == 128 else 4,
        num_stages=2,
    )
