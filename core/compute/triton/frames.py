"""What a depth decoder does between its matrix products, each step in one kernel: many small steps make a frame, and a
launch costs more than what most of them compute.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["place"])
def _attend(
    query,
    key,
    value,
    cache,
    out,
    place,
    scale,
    query_stride,
    key_stride,
    value_stride,
    kind_stride,
    row_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PLACES: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    kv_head = head // group
    dims = tl.arange(0, WIDE)
    fits = dims < DIM
    asked = tl.load(query + row * query_stride + head * DIM + dims, fits, other=0.0).to(tl.float32) * scale
    own_key = tl.load(key + row * key_stride + kv_head * DIM + dims, fits, other=0.0)
    own_value = tl.load(value + row * value_stride + kv_head * DIM + dims, fits, other=0.0)
    base = cache + row * row_stride + kv_head * PLACES * DIM
    if head % group == 0:  # others read only the places before
        tl.store(base + place * DIM + dims, own_key, fits)
        tl.store(base + kind_stride + place * DIM + dims, own_value, fits)
    places = tl.arange(0, TILE)
    seen = places < place
    where = base + places[:, None] * DIM + dims[None, :]
    keys = tl.load(where, seen[:, None] & fits[None, :], other=0.0).to(tl.float32)
    values = tl.load(where + kind_stride, seen[:, None] & fits[None, :], other=0.0).to(tl.float32)
    scores = tl.where(seen, tl.sum(keys * asked[None, :], axis=1), float("-inf"))
    own = tl.sum(own_key.to(tl.float32) * asked, axis=0)
    peak = tl.maximum(tl.max(scores, axis=0), own)
    weights = tl.exp(scores - peak)
    weight = tl.exp(own - peak)
    mixed = tl.sum(weights[:, None] * values, axis=0) + weight * own_value.to(tl.float32)
    mixed = mixed / (tl.sum(weights, axis=0) + weight)
    tl.store(out + (row * HEADS + head) * DIM + dims, mixed.to(out.dtype.element_ty), fits)


def attend_place(query: Tensor, key: Tensor, value: Tensor, cache: Tensor, place: int, scale: float) -> Tensor:
    """One more place of S short sequences: its key and value (S, kv heads, dim) go to `place` of `cache`, (2, S, kv
    heads, places, dim), and its query (S, heads, dim) sees all places up to it. Heads of a row stand together, rows
    may stand apart: they are views of one product."""
    rows, heads, dim = query.shape
    kv_heads, places = cache.shape[2], cache.shape[3]
    out = query.new_empty(rows, heads, dim)
    _attend[(rows, heads)](
        query,
        key,
        value,
        cache,
        out,
        place,
        scale,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        cache.stride(0),
        cache.stride(1),
        heads,
        kv_heads,
        places,
        dim,
        triton.next_power_of_2(dim),
        triton.next_power_of_2(places),
        num_warps=2,
    )
    return out


@triton.jit
def _draw(logits, temperatures, uniform, drawn, width, uniform_stride, TOP: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDE)
    real = columns < width
    values = tl.load(logits + row * width + columns, real, other=float("-inf")).to(tl.float32)
    best = tl.max(values, axis=0)
    # no column equals NaN; what is drawn of such logits counts for nobody, but it is looked up
    first = tl.minimum(tl.min(tl.where(values == best, columns, width), axis=0), width - 1)
    temperature = tl.load(temperatures + row)
    scaled = (values - best) / tl.where(temperature > 0, temperature, 1.0)
    kept = real
    if TOP > 0:
        # floats from 0 on are in the order of their bits: the k-th of them is found bit by bit
        order = tl.where(real, tl.abs(scaled).to(tl.int32, bitcast=True), 0x7F800000)
        least = 0
        for number in tl.static_range(31):
            bit = 1 << (30 - number)
            fewer = tl.sum(tl.where(order < (least | bit), 1, 0), axis=0)
            least = tl.where(fewer < TOP, least | bit, least)
        kept = real & (order <= least)
    weights = tl.where(kept, tl.exp(scaled), 0.0)
    sums = tl.cumsum(weights, axis=0)
    wanted = tl.load(uniform + row * uniform_stride) * tl.max(sums, axis=0)
    place = tl.min(tl.where(kept & (sums > wanted), columns, WIDE), axis=0)
    place = tl.minimum(place, tl.max(tl.where(kept, columns, 0), axis=0))
    tl.store(drawn + row, tl.where(temperature > 0, place, first).to(tl.int64))


def draw_place(logits: Tensor, temperatures: Tensor, uniform: Tensor, top_k: int) -> Tensor:
    """Ids (S,) int64 for logits (S, vocabulary), drawn at numbers (S,) from 0 to 1 among the `top_k` likeliest and
    their ties (0: among all); temperature 0 takes the likeliest. The vocabulary is that of a codebook: a program holds
    all of it."""
    rows, width = logits.shape
    drawn = torch.empty(rows, dtype=torch.int64, device=logits.device)
    top = top_k if 0 < top_k < width else 0
    _draw[(rows,)](
        logits, temperatures, uniform, drawn, width, uniform.stride(0), top, triton.next_power_of_2(width), num_warps=8
    )
    return drawn
