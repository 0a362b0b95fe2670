"""Attention of many queries: tiles of queries over tiles of keys (FlashAttention-2, Dao 2023).

The query heads that share a key head stand in one tile, token by token, so that a row of few tokens fills it and its
keys are read once. Only keys at a tile's edges are masked: those before them every query of the tile sees. Scores are
kept in powers of two.

The grid is flat. Row r begins at program `(starts[r] - starts[0]) // queries + r`, which leaves it as many as it can
need, so the number of programs follows from how many tokens and rows there may be: a recorded launch reads the rest
on the device, and rows of no tokens cost a program each.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from polymux.core.compute.attention import AttentionOptions
from polymux.core.compute.triton.forms import THREE_STAGES, Form, can_hold, choose_form
from polymux.core.compute.triton.jit import kernel
from polymux.core.compute.triton.softmax import LOG2_E

SEARCHED = tl.constexpr(128)
"""Rows that are looked at together when a program looks for its own."""

PACKED = 16
"""The most query heads of one tile."""


@triton.jit
def find_row(starts, rows, program, QUERIES: tl.constexpr):
    """The row that a program works for, and which of the row's programs it is."""
    origin = tl.load(starts)
    row = -1
    for first in range(0, rows, SEARCHED):
        which = first + tl.arange(0, SEARCHED)
        begins = (tl.load(starts + which, which < rows, other=0) - origin).to(tl.int32)
        before = (begins // QUERIES + which <= program) & (which < rows)
        row += tl.sum(before.to(tl.int32), axis=0)
    begin = (tl.load(starts + row) - origin).to(tl.int32)
    return row, program - begin // QUERIES - row


@triton.jit
def locate(
    table,
    start,
    last,
    k_stride,
    v_stride,
    block_stride,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Where the keys and the values of a tile's tokens stand, from the row's first on."""
    each = tl.arange(0, TILE)
    if BLOCK == 0:
        behind = 0
        inside = (start + each).to(tl.int64)
    else:
        if TILE % BLOCK == 0:  # tiles begin with blocks: what is inside them stays the same from tile to tile
            block = start // BLOCK + each // BLOCK
            inside = each % BLOCK
        else:
            block = (start + each) // BLOCK
            inside = (start + each) % BLOCK
        blocks = tl.load(table + block, start + each < last, other=0) if MASKED else tl.load(table + block)
        behind = blocks * block_stride
    return behind + inside * k_stride, behind + inside * v_stride


@triton.jit
def walk(
    peak,
    total,
    mixed,
    q,
    keys_at,
    values_at,
    table,
    begin,
    end,
    last,
    places_q,
    scale,
    k_stride,
    v_stride,
    block_stride,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Take the keys from `begin` to `end`, in tiles, into a running softmax (Milakov and Gimelshein, 2018)."""
    dims = tl.arange(0, WIDE)
    for start in range(begin, end, TILE):
        places = start + tl.arange(0, TILE)
        seen = places < last
        k_where, v_where = locate(table, start, last, k_stride, v_stride, block_stride, BLOCK, TILE, MASKED)
        k_where = keys_at + k_where[:, None] + dims[None, :]
        v_where = values_at + v_where[:, None] + dims[None, :]
        if MASKED:
            loaded = seen[:, None] & (dims < DIM)[None, :]
            keys = tl.load(k_where, loaded, other=0.0)
            values = tl.load(v_where, loaded, other=0.0)
        elif DIM < WIDE:
            keys = tl.load(k_where, (dims < DIM)[None, :], other=0.0)
            values = tl.load(v_where, (dims < DIM)[None, :], other=0.0)
        else:
            keys = tl.load(k_where)
            values = tl.load(v_where)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        factor = scale * LOG2_E
        if SOFTCAP > 0:  # tanh(z) = 2 sigmoid(2z) - 1
            scores = SOFTCAP * (2.0 * tl.sigmoid(scores * (2.0 / SOFTCAP * scale)) - 1.0)
            factor = LOG2_E
        if MASKED:
            mask = seen[None, :]
            if CAUSAL:
                mask = mask & (places[None, :] <= places_q[:, None])
            if WINDOW > 0:
                mask = mask & (places_q[:, None] - places[None, :] < WINDOW)
                if not CAUSAL:
                    mask = mask & (places[None, :] - places_q[:, None] < WINDOW)
            scores = tl.where(mask, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1) * factor)
        safe = higher
        if MASKED:
            safe = tl.where(higher == float("-inf"), 0.0, higher)  # a query that has seen nothing yet
        weights = tl.exp2(scores * factor - safe[:, None])
        shrink = tl.exp2(peak - safe)
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * shrink[:, None], input_precision="ieee")
        peak = higher
    return peak, total, mixed


@kernel()
def _attend(
    query,
    key,
    value,
    out,
    tables,
    slots,
    starts,
    lengths,
    sinks,
    scale,
    rows,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    table_stride,
    block_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PACK: tl.constexpr,
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
    """BLOCK: tokens of a block; 0: keys and values stand with the queries, and rows see only themselves."""
    QUERIES: tl.constexpr = ROWS // PACK
    row, tile = find_row(starts, rows, tl.program_id(1), QUERIES)
    begin = tl.load(starts + row).to(tl.int64)
    count = (tl.load(starts + row + 1) - begin).to(tl.int32)
    # the longest tiles first: they end last
    tile = tl.cdiv(count, QUERIES) - 1 - tile
    if tile < 0:
        return
    which = tl.arange(0, ROWS)
    head = tl.program_id(0) * PACK + which % PACK
    kv_head = tl.program_id(0) * PACK // (HEADS // KV_HEADS)
    tokens = tile * QUERIES + which // PACK
    here = (which < QUERIES * PACK) & (tokens < count)
    dims = tl.arange(0, WIDE)
    real = here[:, None] & (dims < DIM)[None, :]
    where_q = (begin + tokens) * q_stride + head * q_head_stride
    q = tl.load(query + where_q[:, None] + dims[None, :], real, other=0.0)
    length = count
    keys_at = key + kv_head * k_head_stride
    values_at = value + kv_head * v_head_stride
    table = tables
    if BLOCK > 0:
        length = tl.load(lengths + row).to(tl.int32)
        table += tl.load(slots + row) * table_stride
    else:
        keys_at += begin * k_stride
        values_at += begin * v_stride
    # from the tile's first query on, and up to its last
    lowest = length - count + tile * QUERIES
    highest = tl.minimum(lowest + QUERIES, length)
    places_q = length - count + tokens
    first = 0
    last = length
    whole = length // TILE * TILE
    if CAUSAL:
        last = highest
        whole = (lowest + 1) // TILE * TILE
    entire = 0
    if WINDOW > 0:
        first = tl.maximum(lowest - WINDOW + 1, 0) // TILE * TILE
        entire = tl.cdiv(tl.maximum(highest - WINDOW, 0), TILE) * TILE
        if not CAUSAL:
            last = tl.minimum(length, highest + WINDOW - 1)
            whole = tl.minimum(last, lowest + WINDOW) // TILE * TILE
        whole = tl.maximum(whole, first)
        entire = tl.minimum(entire, whole)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDE], tl.float32)
    if WINDOW > 0:
        peak, total, mixed = walk(
            peak, total, mixed, q, keys_at, values_at, table, first, entire, last, places_q, scale, k_stride, v_stride,
            block_stride, DIM, WIDE, BLOCK, TILE, True, CAUSAL, WINDOW, SOFTCAP,
        )  # fmt: skip
    peak, total, mixed = walk(
        peak, total, mixed, q, keys_at, values_at, table, entire, whole, last, places_q, scale, k_stride, v_stride,
        block_stride, DIM, WIDE, BLOCK, TILE, False, CAUSAL, WINDOW, SOFTCAP,
    )  # fmt: skip
    peak, total, mixed = walk(
        peak, total, mixed, q, keys_at, values_at, table, whole, last, last, places_q, scale, k_stride, v_stride,
        block_stride, DIM, WIDE, BLOCK, TILE, True, CAUSAL, WINDOW, SOFTCAP,
    )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        higher = tl.maximum(peak, sink)
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.exp2(sink - higher)
        mixed = mixed * shrink[:, None]
    result = mixed / tl.where(total > 0, total, 1.0)[:, None]
    target = out + ((begin + tokens) * HEADS + head)[:, None] * DIM + dims[None, :]
    tl.store(target, result.to(out.dtype.element_ty), real)


class Blocks(NamedTuple):
    """Where rows find keys and values that stand in blocks: see `prefill.attend_chunks`."""

    tables: Tensor
    slots: Tensor
    lengths: Tensor
    size: int
    """Tokens of a block."""


def attend_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    starts: Tensor,
    blocks: Blocks | None,
    options: AttentionOptions,
    form: Form | None = None,
) -> None:
    """Row r's queries are query[starts[r]:starts[r + 1]]; `query` and `out` are (T, heads, dim).

    Keys and values: with `blocks` (blocks, block, kv heads, dim), else (T, kv heads, dim). All but `out` may be views:
    only their last dimension must be dense.
    """
    tokens, heads, dim = query.shape
    kv_heads = key.shape[-2]
    group = heads // kv_heads
    pack = max(size for size in range(1, PACKED + 1) if group % size == 0)
    wide = max(16, triton.next_power_of_2(dim))
    if form is None:
        deep = blocks is not None and can_hold(query.device, THREE_STAGES)
        form = choose_form(tokens, pack, wide, query.element_size(), deep)
    rows = len(starts) - 1
    _attend[(heads // pack, tokens // (form.rows // pack) + rows)](
        query,
        key,
        value,
        out,
        blocks.tables if blocks else starts,
        blocks.slots if blocks else starts,
        starts,
        blocks.lengths if blocks else starts,
        options.sinks if options.sinks is not None else query,
        options.scale,
        rows,
        query.stride(0),
        query.stride(1),
        key.stride(-3),
        key.stride(-2),
        value.stride(-3),
        value.stride(-2),
        blocks.tables.stride(0) if blocks else 0,
        key.stride(0) if blocks else 0,
        heads,
        kv_heads,
        pack,
        dim,
        wide,
        blocks.size if blocks else 0,
        form.rows,
        form.tile,
        options.causal,
        options.window or 0,
        options.softcap or 0.0,
        options.sinks is not None,
        num_warps=form.warps,
        num_stages=form.stages,
        maxnreg=form.registers,
    )
