"""Paged attention for rows that bring many queries: tiles of queries over blocks of keys (FlashAttention-2, Dao 2023).

The new keys and values are in the cache already, so a chunk and a cached prefix are read alike.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from polymux.core.compute.attention import AttentionOptions
from polymux.core.compute.triton.jit import kernel
from polymux.core.compute.triton.softmax import fold, fold_sink, load_tile, score

QUERIES = 128


@kernel()
def _attend(
    query,
    cache,
    out,
    tables,
    slots,
    starts,
    lengths,
    sinks,
    scale,
    table_stride,
    block_stride,
    value_stride,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    tile = tl.program_id(2)
    row = tl.program_id(1)
    head = tl.program_id(0)
    begin = tl.load(starts + row)
    count = (tl.load(starts + row + 1) - begin).to(tl.int32)
    length = tl.load(lengths + row).to(tl.int32)
    # the longest tiles first: they end last
    tile = tl.cdiv(count, ROWS) - 1 - tile
    if tile < 0:
        return
    kv_head = head // (HEADS // KV_HEADS)
    rows = tile * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, WIDE)
    here = rows < count
    fits = dims < DIM
    where_q = ((begin + rows) * HEADS + head)[:, None] * DIM + dims[None, :]
    q = tl.load(query + where_q, here[:, None] & fits[None, :], other=0.0)
    places_q = length - count + rows
    table = tables + tl.load(slots + row) * table_stride
    base = cache + kv_head * head_stride + dims[None, :]
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDE], tl.float32)
    last = length
    first = 0
    if CAUSAL:
        last = tl.minimum(length, length - count + (tile + 1) * ROWS)
    if WINDOW > 0:
        first = tl.maximum(length - count + tile * ROWS - WINDOW + 1, 0) // TILE * TILE
    for start in range(first, last, TILE):
        places = start + tl.arange(0, TILE)
        seen = places < last
        keys, values = load_tile(base, table, places, seen, fits, block_stride, value_stride, token_stride, BLOCK)
        scores = score(q, keys, scale, SOFTCAP)
        mask = seen[None, :]
        if CAUSAL:
            mask = mask & (places[None, :] <= places_q[:, None])
        if WINDOW > 0:
            mask = mask & (places_q[:, None] - places[None, :] < WINDOW)
        scores = tl.where(mask, scores, float("-inf"))
        peak, total, mixed = fold(peak, total, mixed, scores, values)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        peak, total, mixed = fold_sink(peak, total, mixed, sink)
    result = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + where_q, result.to(out.dtype.element_ty), here[:, None] & fits[None, :])


def attend_chunks(
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    block: int,
    most: int,
    options: AttentionOptions,
    out: Tensor,
) -> None:
    """Rows of several queries each: row r's are query[starts[r]:starts[r + 1]], the last of its `lengths[r]` tokens.

    `query` and `out` are (T, heads, dim), `cache` is (blocks, 2, block, kv heads, dim); `most` bounds the queries of
    a row.
    """
    heads, dim = query.shape[1:]
    kv_heads = cache.shape[3]
    wide = triton.next_power_of_2(dim)
    rows = QUERIES if wide <= 128 and most > 64 else 64
    grid = (heads, lengths.shape[0], triton.cdiv(most, rows))
    _attend[grid](
        query,
        cache,
        out,
        tables,
        slots,
        starts,
        lengths,
        options.sinks if options.sinks is not None else query,
        options.scale,
        tables.stride(0),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        cache.stride(3),
        heads,
        kv_heads,
        dim,
        wide,
        block,
        rows,
        64,
        options.causal,
        options.window or 0,
        options.softcap or 0.0,
        options.sinks is not None,
        num_warps=8 if rows * wide >= 64 * 256 else 4,
        num_stages=3 if wide <= 128 else 2,
    )
