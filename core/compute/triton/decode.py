"""Paged attention for rows that bring one query each: split over the keys, grouped heads together.

A program reads one stretch of one row's keys and values once, for all query heads that share a key head (Dao et al.,
Flash-Decoding, 2023); a second kernel joins the stretches by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from polymux.core.compute.attention import AttentionOptions
from polymux.core.compute.triton.jit import kernel
from polymux.core.compute.triton.prefix import STRETCHES, attend_prefix
from polymux.core.compute.triton.softmax import LOG2_E, fold_sink, score

PROGRAMS = 1024
"""Programs wanted at least, so that every multiprocessor of a large card has some."""

MAX_SPLITS = 32

NOTHING = tl.constexpr(-1e30)
"""The highest score of a query that has seen nothing yet: what is masked, is below it."""


class Form(NamedTuple):
    """How a stretch is read."""

    tile: int
    """Keys taken at a time."""
    warps: int
    stages: int
    """Tiles that are on their way at once."""


def choose_form(wide: int, group: int, sharing: bool) -> Form:
    """Microseconds on an H200: 256 rows of 400 to 680 tokens, 8 key heads of 128, 140 in tiles of 32 and 143 of 64;
    256 of 100 to 2,000, 250 and 254. 64 slabs of 1,500 frames, 20 heads of 64: 122 in tiles of 64 and 158 of 32."""
    if sharing or wide > 128:
        return Form(64, 4, 2)
    if wide <= 64 or group > 32:
        return Form(64, 4, 3)
    return Form(32, 2, 4)


@triton.jit
def _take(
    peak,
    total,
    mixed,
    q,
    base,
    table,
    blocks,
    start,
    last,
    oldest,
    fits,
    scale,
    block_stride,
    value_stride,
    token_stride,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Take the tile from `start` on, whose `blocks` are known, into the sums; the next tile's blocks come with them."""
    places = start + tl.arange(0, TILE)
    seen = (places < last) & (places >= oldest)
    where = base + (blocks * block_stride + (places % BLOCK) * token_stride)[:, None]
    blocks = tl.load(table + (places + TILE) // BLOCK, places + TILE < last, other=0)
    if MASKED:
        keys = tl.load(where, seen[:, None] & fits[None, :], other=0.0)
        values = tl.load(where + value_stride, seen[:, None] & fits[None, :], other=0.0)
    elif PADDED:
        keys = tl.load(where, fits[None, :], other=0.0)
        values = tl.load(where + value_stride, fits[None, :], other=0.0)
    else:
        keys = tl.load(where)
        values = tl.load(where + value_stride)
    scores = score(q, keys, scale, SOFTCAP) * LOG2_E
    if MASKED:
        scores = tl.where(seen[None, :], scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    shrink = tl.exp2(peak - higher)
    weights = tl.exp2(scores - higher[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * shrink[:, None], input_precision="ieee")
    return higher, total, mixed, blocks


@kernel()
def _read(
    query,
    cache,
    out,
    partial,
    tables,
    slots,
    lengths,
    sinks,
    shared,
    scale,
    table_stride,
    block_stride,
    value_stride,
    token_stride,
    head_stride,
    splits,
    SHARED: tl.constexpr,
    WHOLE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    length = tl.load(lengths + row).to(tl.int32)
    begin = 0
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(length - WINDOW, 0)
        begin = oldest // TILE * TILE
    if SHARED > 0:
        begin = tl.minimum(tl.load(shared).to(tl.int32), length)
    share = tl.cdiv(tl.cdiv(length - begin, splits), TILE) * TILE
    first = begin + split * share
    last = tl.minimum(first + share, length)
    heads = tl.arange(0, GROUP)
    dims = tl.arange(0, WIDE)
    here = heads < group
    fits = dims < DIM
    head = kv_head * group + heads
    peak = tl.full([GROUP], NOTHING, tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    mixed = tl.zeros([GROUP, WIDE], tl.float32)
    if first < last:
        table = tables + tl.load(slots + row) * table_stride
        ahead = first + tl.arange(0, TILE)
        blocks = tl.load(table + ahead // BLOCK, ahead < last, other=0)
        q = tl.load(
            query + (row * HEADS + head[:, None]) * DIM + dims[None, :], here[:, None] & fits[None, :], other=0.0
        )
        base = cache + kv_head * head_stride + dims[None, :]
        whole = first
        if WINDOW == 0:
            whole += (last - first) // TILE * TILE
        for start in range(first, whole, TILE):
            peak, total, mixed, blocks = _take(
                peak, total, mixed, q, base, table, blocks, start, last, oldest, fits, scale, block_stride,
                value_stride, token_stride, BLOCK, TILE, WIDE > DIM, False, SOFTCAP,
            )  # fmt: skip
        if WINDOW > 0:
            for start in range(whole, last, TILE):
                peak, total, mixed, blocks = _take(
                    peak, total, mixed, q, base, table, blocks, start, last, oldest, fits, scale, block_stride,
                    value_stride, token_stride, BLOCK, TILE, WIDE > DIM, True, SOFTCAP,
                )  # fmt: skip
        else:
            if whole < last:
                peak, total, mixed, blocks = _take(
                    peak, total, mixed, q, base, table, blocks, whole, last, oldest, fits, scale, block_stride,
                    value_stride, token_stride, BLOCK, TILE, WIDE > DIM, True, SOFTCAP,
                )  # fmt: skip
    peak = peak / LOG2_E
    if SINKS and split == 0:
        sink = tl.load(sinks + head, here, other=0.0).to(tl.float32)
        peak, total, mixed = fold_sink(peak, total, mixed, sink)
    if WHOLE:
        result = mixed / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            out + (row * HEADS + head[:, None]) * DIM + dims[None, :],
            result.to(out.dtype.element_ty),
            here[:, None] & fits[None, :],
        )
    else:
        target = partial + ((row * HEADS + head) * (SHARED + splits) + SHARED + split) * (DIM + 2)
        tl.store(target[:, None] + dims[None, :], mixed, here[:, None] & fits[None, :])
        tl.store(target + DIM, peak, here)
        tl.store(target + DIM + 1, total, here)


@kernel()
def _join(partial, out, count, BOUND: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, WIDE)
    fits = dims < DIM
    parts = tl.arange(0, BOUND)
    real = parts < count
    base = partial + (head * count + parts) * (DIM + 2)
    peaks = tl.load(base + DIM, real, other=float("-inf"))
    totals = tl.load(base + DIM + 1, real, other=0.0)
    peak = tl.max(peaks, axis=0)
    factors = tl.where(peaks == float("-inf"), 0.0, tl.exp(peaks - peak))
    total = tl.sum(totals * factors, axis=0)
    mixed = tl.load(base[:, None] + dims[None, :], real[:, None] & fits[None, :], other=0.0)
    result = tl.sum(mixed * factors[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + head * DIM + dims, result.to(out.dtype.element_ty), fits)


@lru_cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def beside_others(device: torch.device) -> Iterator[None]:
    """What is launched inside may run at the same time as what follows, until the caller waits for it."""
    if device.type != "cuda":  # interpreted
        yield
        return
    side = side_stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield


def wait_for_side(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream().wait_stream(side_stream(device))


def choose_splits(rows: int, kv_heads: int, longest: int) -> int:
    """A power of two: enough programs for the card, but no split shorter than a tile or two."""
    splits = 1
    while splits < MAX_SPLITS and rows * kv_heads * splits < PROGRAMS and splits * 128 < longest:
        splits *= 2
    return splits


def attend_singles(
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    slots: Tensor,
    lengths: Tensor,
    block: int,
    longest: int,
    options: AttentionOptions,
    shared: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """(R, heads, dim) queries, one per row, over `cache` (blocks, 2, block, kv heads, dim): (R, heads, dim).

    Row r reads the first `lengths[r]` tokens of the blocks in `tables[slots[r]]`. `longest` bounds the lengths.
    `shared` holds how many leading tokens all rows have in common: those are read once, beside the rows' own.
    Windowed layers do without. `out`: where the result goes.
    """
    if options.window is not None:
        shared = None
    rows, heads, dim = query.shape
    kv_heads = cache.shape[3]
    splits = choose_splits(rows, kv_heads, min(longest, options.window or longest))
    out = torch.empty_like(query) if out is None else out
    common = STRETCHES if shared is not None else 0
    parts = common + splits
    partial = torch.empty(rows, heads, parts, dim + 2, dtype=torch.float32, device=query.device) if parts > 1 else query
    group = max(16, triton.next_power_of_2(heads // kv_heads))
    wide = triton.next_power_of_2(dim)
    form = choose_form(wide, group, shared is not None)
    if shared is not None:  # bound by latency, and the rows' own keys by bandwidth: both at once
        with beside_others(query.device):
            attend_prefix(query, cache, tables, slots, shared, block, options, partial)
    # programs start in this order: a row's heads, whose keys lie side by side, and the first rows first in all heads
    _read[(kv_heads, rows, splits)](
        query,
        cache,
        out,
        partial,
        tables,
        slots,
        lengths,
        options.sinks if options.sinks is not None else query,
        shared if shared is not None else lengths,
        options.scale,
        tables.stride(0),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        cache.stride(3),
        splits,
        common,
        parts == 1,
        heads,
        kv_heads,
        group,
        dim,
        wide,
        block,
        form.tile,
        options.window or 0,
        options.softcap or 0.0,
        options.sinks is not None,
        num_warps=form.warps,
        num_stages=form.stages,
    )
    if shared is not None:
        wait_for_side(query.device)
    if parts > 1:
        _join[(rows * heads,)](partial, out, parts, 16 if parts <= 16 else 64, dim, wide, num_warps=2)
    return out
