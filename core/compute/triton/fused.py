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
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + token)
    if position < 0:
        return
    half = tl.arange(0, HALF)
    mask = half < DIM // 2
    source = merged + (token * (HEADS + 2 * KV_HEADS) + head) * DIM
    first = tl.load(source + half, mask, other=0.0).to(tl.float32)
    second = tl.load(source + DIM // 2 + half, mask, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORM:
            weight = q_weight
            if head >= HEADS:
                weight = k_weight
            scale = tl.rsqrt((tl.sum(first * first) + tl.sum(second * second)) / DIM + eps)
            first = first * scale * tl.load(weight + half, mask, other=0.0).to(tl.float32)
            second = second * scale * tl.load(weight + DIM // 2 + half, mask, other=0.0).to(tl.float32)
        turn = tl.load(turns + token) * DIM
        cos = tl.load(cosines + turn + half, mask, other=0.0).to(tl.float32)
        sin = tl.load(sines + turn + half, mask, other=0.0).to(tl.float32)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    if head < HEADS:
        target = query + (token * HEADS + head) * DIM
    else:
        block = tl.load(tables + tl.load(slots + token) * table_stride + position // BLOCK)
        target = cache + block * block_stride + (position % BLOCK) * token_stride
        if head < HEADS + KV_HEADS:
            target += (head - HEADS) * DIM
        else:
            target += value_stride + (head - HEADS - KV_HEADS) * DIM
    tl.store(target + half, first.to(target.dtype.element_ty), mask)
    tl.store(target + DIM // 2 + half, second.to(target.dtype.element_ty), mask)


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
    _rotate_write[(tokens, heads + 2 * kv_heads)](
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
        num_warps=1,
    )
    return query
