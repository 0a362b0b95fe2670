"""Attention of rows that bring one token to a decoder whose heads are not grouped: few and short launches.

attend_own    a row's token is written into its block and attends to all before it, in one kernel
attend_slab   a token attends to all of its row's slab; stretches are joined by the program that ends last

`decode` has the kernels for everything else: grouped heads, windows, caps, sinks, common prefixes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from polymux.core.compute.attention import PagedBatch
from polymux.core.compute.triton.jit import kernel

TILE = 64
"""Frames of a slab that a program looks at at once."""

OWN_TILE = 128
"""Tokens of its row: most texts are no longer, and every further stretch is one more wait for memory."""

MANY_TILE, MANY_WARPS = 32, 2
"""The same where there are many rows: programs so small that all of a large batch's are on the card at once."""

PROGRAMS = 512
"""Programs wanted at least: some four on each multiprocessor of a large card."""

MOST_STRETCHES = 32


@triton.jit
def fold_one(peak, total, mixed, scores, values):
    """One more tile of scores (tile,), -inf where masked, and values (tile, wide) into one query's softmax."""
    higher = tl.maximum(peak, tl.max(scores, axis=0))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp(peak - safe)
    weights = tl.exp(scores - safe)
    total = total * shrink + tl.sum(weights, axis=0)
    mixed = mixed * shrink + tl.sum(weights[:, None] * values.to(tl.float32), axis=0)
    return higher, total, mixed


@kernel()
def _attend_own(
    merged,
    cache,
    out,
    tables,
    slots,
    positions,
    scale,
    table_stride,
    block_stride,
    value_stride,
    place_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, WIDE)
    fits = dims < DIM
    target = out + (row * HEADS + head) * DIM + dims
    position = tl.load(positions + row)
    if position < 0:  # padding
        tl.store(target, tl.zeros([WIDE], out.dtype.element_ty), fits)
        return
    source = merged + (row * 3 * HEADS + head) * DIM + dims
    query = tl.load(source, fits, other=0.0).to(tl.float32)
    key = tl.load(source + HEADS * DIM, fits, other=0.0)
    value = tl.load(source + 2 * HEADS * DIM, fits, other=0.0)
    table = tables + tl.load(slots + row) * table_stride
    base = cache + head * DIM + dims
    own = base + tl.load(table + position // BLOCK) * block_stride + (position % BLOCK) * place_stride
    tl.store(own, key, fits)
    tl.store(own + value_stride, value, fits)
    peak = tl.sum(query * key.to(tl.float32), axis=0) * scale
    total = 1.0
    mixed = value.to(tl.float32)
    for start in range(0, position, TILE):
        places = start + tl.arange(0, TILE)
        seen = places < position
        blocks = tl.load(table + places // BLOCK, seen, other=0)
        where = base[None, :] + (blocks * block_stride + (places % BLOCK) * place_stride)[:, None]
        mask = seen[:, None] & fits[None, :]
        keys = tl.load(where, mask, other=0.0).to(tl.float32)
        values = tl.load(where + value_stride, mask, other=0.0)
        scores = tl.where(seen, tl.sum(keys * query[None, :], axis=1) * scale, float("-inf"))
        peak, total, mixed = fold_one(peak, total, mixed, scores, values)
    tl.store(target, (mixed / total).to(out.dtype.element_ty), fits)


@kernel()
def _attend_slab(
    query,
    slabs,
    out,
    partial,
    arrived,
    slots,
    scale,
    frames,
    share,
    parts,
    slab_stride,
    value_stride,
    frame_stride,
    head_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    BOUND: tl.constexpr,
    WHOLE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    stretch = tl.program_id(2)
    dims = tl.arange(0, WIDE)
    fits = dims < DIM
    own = row * HEADS + head
    asked = tl.load(query + own * DIM + dims, fits, other=0.0).to(tl.float32)
    slab = tl.load(slots + row)
    base = slabs + slab * slab_stride + head * head_stride + dims
    first = stretch * share
    last = tl.minimum(first + share, frames)
    peak = float("-inf")
    total = 0.0
    mixed = tl.zeros([WIDE], tl.float32)
    for start in range(first, last, TILE):
        places = start + tl.arange(0, TILE)
        seen = places < last
        where = base[None, :] + places[:, None].to(tl.int64) * frame_stride
        mask = seen[:, None] & fits[None, :]
        keys = tl.load(where, mask, other=0.0).to(tl.float32)
        values = tl.load(where + value_stride, mask, other=0.0)
        scores = tl.where(seen, tl.sum(keys * asked[None, :], axis=1) * scale, float("-inf"))
        peak, total, mixed = fold_one(peak, total, mixed, scores, values)
    target = out + own * DIM + dims
    if WHOLE:
        tl.store(target, (mixed / total).to(out.dtype.element_ty), fits)
    else:
        place = partial + (own * parts + stretch) * (DIM + 2)
        tl.store(place + dims, mixed, fits)
        tl.store(place + DIM, peak)
        tl.store(place + DIM + 1, total)
        tl.debug_barrier()  # all threads have stored before one of them says so
        before = tl.atomic_add(arrived + own, 1, sem="acq_rel", scope="gpu")
        if before == parts - 1:
            each = tl.arange(0, BOUND)
            real = each < parts
            read = partial + (own * parts + each) * (DIM + 2)
            # past this multiprocessor's own cache, which may hold what stood there before
            peaks = tl.load(read + DIM, real, other=float("-inf"), cache_modifier=".cg")
            totals = tl.load(read + DIM + 1, real, other=0.0, cache_modifier=".cg")
            mask = real[:, None] & fits[None, :]
            sums = tl.load(read[:, None] + dims[None, :], mask, other=0.0, cache_modifier=".cg")
            factors = tl.exp(peaks - tl.max(peaks, axis=0))
            joined = tl.sum(sums * factors[:, None], axis=0) / tl.sum(totals * factors, axis=0)
            tl.store(target, joined.to(out.dtype.element_ty), fits)
            tl.store(arrived + own, 0)  # for the next launch


@lru_cache
def count_arrivals(device: torch.device, places: int) -> Tensor:
    """(places,) int32 zeros, which every launch leaves as it found them. Launches of one stream share them."""
    return torch.zeros(places, dtype=torch.int32, device=device)


def attend_own(merged: Tensor, heads: int, cache: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """(R, 3 heads, dim): queries, keys and values of rows that bring one token each: (R, heads, dim).

    Keys and values go to their blocks of `cache` (blocks, 2, block, heads, dim); the query attends to its row's tokens
    up to its own. Padding (position -1) writes nothing and gives 0.
    """
    rows, _, dim = merged.shape
    out = merged.new_empty(rows, heads, dim)
    tile, warps = (OWN_TILE, 8) if rows * heads < PROGRAMS else (MANY_TILE, MANY_WARPS)
    _attend_own[(rows, heads)](
        merged,
        cache,
        out,
        batch.tables,
        batch.token_slots,
        batch.positions,
        scale,
        batch.tables.stride(0),
        *cache.stride()[:3],
        heads,
        dim,
        triton.next_power_of_2(dim),
        batch.block,
        tile,
        num_warps=warps,
    )
    return out


def attend_slab(query: Tensor, slabs: Tensor, slots: Tensor, scale: float) -> Tensor:
    """(T, heads, dim) queries, each to all of the slab `slots[t]` of `slabs` (slabs, 2, frames, heads, dim):
    (T, heads, dim)."""
    tokens, heads, dim = query.shape
    frames = slabs.shape[2]
    parts = 1
    while parts < MOST_STRETCHES and tokens * heads * parts < PROGRAMS and parts * TILE < frames:
        parts *= 2
    share = triton.cdiv(triton.cdiv(frames, parts), TILE) * TILE
    parts = triton.cdiv(frames, share)
    out = torch.empty_like(query)
    partial, arrived = query, query
    if parts > 1:
        partial = torch.empty(tokens, heads, parts, dim + 2, dtype=torch.float32, device=query.device)
        arrived = count_arrivals(query.device, PROGRAMS)
    _attend_slab[(tokens, heads, parts)](
        query,
        slabs,
        out,
        partial,
        arrived,
        slots,
        scale,
        frames,
        share,
        parts,
        slabs.stride(0),
        slabs.stride(1),
        slabs.stride(2),
        slabs.stride(3),
        heads,
        dim,
        triton.next_power_of_2(dim),
        TILE,
        MOST_STRETCHES,
        parts == 1,
        num_warps=4,
        num_stages=2,
    )
    return out
