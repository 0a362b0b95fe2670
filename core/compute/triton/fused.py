"""Elementwise steps of a decoder layer, each in one kernel: norm with residual, rotary with cache write, gating."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polymux.core.compute.attention import PagedBatch


@triton.jit
def _add_norm(x, residual, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    value = tl.load(x + row * WIDTH + columns, mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * WIDTH + columns, mask, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row * WIDTH + columns, rounded, mask)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / WIDTH + eps)
    factor = tl.load(weight + columns, mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, (value * scale * factor).to(out.dtype.element_ty), mask)


def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x + residual, (T, d); the sum is left in `residual`. Without a residual, of x alone."""
    out = torch.empty_like(x)
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    target = x if residual is None else residual
    _add_norm[(x.shape[0],)](
        x, target, weight, out, eps, width, block, residual is not None, num_warps=min(16, max(1, block // 512))
    )
    return out


@triton.jit
def _gate(gate_up, out, WIDTH, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + columns, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + columns, mask, other=0.0).to(tl.float32)
    if KIND == 0:
        gate = gate * tl.sigmoid(gate)
    else:  # the tanh form of GELU: tanh(z) = 2 sigmoid(2z) - 1
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * tl.sigmoid(2.0 * inner)
    tl.store(out + row * WIDTH + columns, (gate * up).to(out.dtype.element_ty), mask)


GATES = {"silu": 0, "gelu_tanh": 1}


def gate(gate_up: Tensor, kind: str) -> Tensor:
    """act(gate) * up from (T, 2 i), gate first: (T, i)."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _gate[(rows, triton.cdiv(width, 1024))](gate_up, out, width, GATES[kind], 1024, num_warps=4)
    return out


HEADS_TOGETHER = 8
"""Heads of one token that a program rotates: one each would be more programs than a card starts in the time."""


@triton.jit
def _rotate_write(
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
    table_stride,
    block_stride,
    value_stride,
    token_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    if position < 0:
        return
    head = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    half = tl.arange(0, HALF)
    mask = (head < HEADS + 2 * KV_HEADS)[:, None] & (half < DIM // 2)[None, :]
    source = merged + (token * (HEADS + 2 * KV_HEADS) + head)[:, None] * DIM + half[None, :]
    first = tl.load(source, mask, other=0.0).to(tl.float32)
    second = tl.load(source + DIM // 2, mask, other=0.0).to(tl.float32)
    rotated = (head < HEADS + KV_HEADS)[:, None]
    turn = tl.load(turns + token) * DIM
    inside = half < DIM // 2
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
    cos = tl.load(cosines + turn + half, inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sines + turn + half, inside, other=0.0).to(tl.float32)[None, :]
    first = tl.where(rotated, normed_first * cos - normed_second * sin, first)
    second = tl.where(rotated, normed_second * cos + normed_first * sin, second)
    block = tl.load(tables + tl.load(slots + token) * table_stride + position // BLOCK)
    place = block * block_stride + (position % BLOCK) * token_stride
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


def rotate_write(
    merged: Tensor,
    heads: int,
    kv_heads: int,
    turning: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor, float] | None,
    cache: Tensor,
    batch: PagedBatch,
) -> Tensor:
    """From the merged projection (T, heads + 2 kv heads, dim): norms and rotary on queries and keys; keys and values
    go to their blocks of `cache` (blocks, 2, block, kv heads, dim); the queries, (T, heads, dim), are returned.

    `turning` is a table of cosines and sines, (2, rows, dim), and each token's row; `norms` holds the weights for
    queries and keys, and their epsilon.
    """
    tokens, _, dim = merged.shape
    query = merged.new_empty(tokens, heads, dim)
    rotary, turns = turning
    q_weight, k_weight, eps = norms if norms is not None else (merged, merged, 0.0)
    _rotate_write[(tokens, triton.cdiv(heads + 2 * kv_heads, HEADS_TOGETHER))](
        merged,
        query,
        cache,
        rotary[0],
        rotary[1],
        turns,
        q_weight,
        k_weight,
        batch.tables,
        batch.token_slots,
        batch.positions,
        batch.tables.stride(0),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        eps,
        heads,
        kv_heads,
        dim,
        triton.next_power_of_2(dim // 2),
        batch.block,
        norms is not None,
        HEADS_TOGETHER,
        num_warps=4,
    )
    return query
