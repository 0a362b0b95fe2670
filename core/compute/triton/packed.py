"""Rows of a packed batch that see only themselves: attention straight from the merged product.

Queries, keys and values are read where the projection left them; nothing is copied, split or padded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polymux.core.compute.attention import AttentionOptions
from polymux.core.compute.triton.jit import kernel
from polymux.core.compute.triton.softmax import fold, fold_sink, score


@kernel()
def _attend(
    query,
    key,
    value,
    out,
    starts,
    sinks,
    scale,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    begin = tl.load(starts + row).to(tl.int64)
    count = (tl.load(starts + row + 1) - begin).to(tl.int32)
    # the longest tiles first: they end last
    tile = tl.cdiv(count, ROWS) - 1 - tl.program_id(2)
    if tile < 0:
        return
    kv_head = head // (HEADS // KV_HEADS)
    rows = tile * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, WIDE)
    fits = dims < DIM
    here = (rows < count)[:, None] & fits[None, :]
    q = tl.load(query + (begin + rows)[:, None] * q_stride + head * q_head_stride + dims[None, :], here, other=0.0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDE], tl.float32)
    first = 0
    last = count
    if CAUSAL:
        last = tl.minimum(count, (tile + 1) * ROWS)
    if WINDOW > 0:
        first = tl.maximum(tile * ROWS - WINDOW + 1, 0) // TILE * TILE
        if not CAUSAL:
            last = tl.minimum(count, (tile + 1) * ROWS + WINDOW - 1)
    for start in range(first, last, TILE):
        places = start + tl.arange(0, TILE)
        seen = (places < last)[:, None] & fits[None, :]
        token = (begin + places)[:, None]
        keys = tl.load(key + token * k_stride + kv_head * k_head_stride + dims[None, :], seen, other=0.0)
        values = tl.load(value + token * v_stride + kv_head * v_head_stride + dims[None, :], seen, other=0.0)
        scores = score(q, keys, scale, SOFTCAP)
        mask = (places < last)[None, :]
        if CAUSAL:
            mask = mask & (places[None, :] <= rows[:, None])
        if WINDOW > 0:
            mask = mask & (rows[:, None] - places[None, :] < WINDOW)
            if not CAUSAL:
                mask = mask & (places[None, :] - rows[:, None] < WINDOW)
        scores = tl.where(mask, scores, float("-inf"))
        peak, total, mixed = fold(peak, total, mixed, scores, values)
    if SINKS:
        peak, total, mixed = fold_sink(peak, total, mixed, tl.load(sinks + head).to(tl.float32))
    result = mixed / tl.where(total > 0, total, 1.0)[:, None]
    target = out + ((begin + rows) * HEADS + head)[:, None] * DIM + dims[None, :]
    tl.store(target, result.to(out.dtype.element_ty), here)


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, options: AttentionOptions
) -> Tensor:
    """Attention inside each row: row r's tokens are those from starts[r] to starts[r + 1]; (T, heads, dim).

    `starts` is (R + 1,) int32. The three may be views of one tensor: only their last dimension must be dense.
    """
    tokens, heads, dim = query.shape
    wide = triton.next_power_of_2(dim)
    rows = 128 if wide <= 128 and longest > 64 else 64
    out = torch.empty(tokens, heads, dim, dtype=query.dtype, device=query.device)
    _attend[(heads, len(starts) - 1, triton.cdiv(longest, rows))](
        query,
        key,
        value,
        out,
        starts,
        options.sinks if options.sinks is not None else query,
        options.scale,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        heads,
        key.shape[1],
        dim,
        wide,
        rows,
        64,
        options.causal,
        options.window or 0,
        options.softcap or 0.0,
        options.sinks is not None,
        num_warps=8 if rows * wide >= 64 * 256 else 4,
        num_stages=3 if wide <= 128 else 2,
    )
    return out
