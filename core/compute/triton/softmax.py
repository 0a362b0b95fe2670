"""What attention kernels share: a running softmax over scores that come tile by tile (Milakov and Gimelshein, 2018)."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
"""For scores in powers of two."""


@triton.jit
def load_tile(base, table, places, seen, fits, block_stride, value_stride, token_stride, BLOCK: tl.constexpr):
    """Keys and values (tile, wide) of the tokens at `places` of a row, whose blocks stand in `table`."""
    blocks = tl.load(table + places // BLOCK, seen, other=0)
    where = base + (blocks * block_stride + (places % BLOCK) * token_stride)[:, None]
    keys = tl.load(where, seen[:, None] & fits[None, :], other=0.0)
    values = tl.load(where + value_stride, seen[:, None] & fits[None, :], other=0.0)
    return keys, values


@triton.jit
def score(q, keys, scale, SOFTCAP: tl.constexpr):
    """Scaled dot products (queries, tile) in fp32, capped softly if the model does."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee").to(tl.float32) * scale
    if SOFTCAP > 0:  # tanh(z) = 2 sigmoid(2z) - 1
        scores = SOFTCAP * (2.0 * tl.sigmoid(2.0 * scores / SOFTCAP) - 1.0)
    return scores


@triton.jit
def fold(peak, total, mixed, scores, values):
    """Take one more tile of scores (-inf where masked) into a softmax-weighted sum of values."""
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)  # a query that has seen nothing yet
    shrink = tl.exp(peak - safe)
    weights = tl.exp(scores - safe[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    mixed = mixed * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return higher, total, mixed


@triton.jit
def fold_sink(peak, total, mixed, sink):
    """Take a logit per query that attends to nothing into the softmax."""
    higher = tl.maximum(peak, sink)
    shrink = tl.exp(peak - higher)
    return higher, total * shrink + tl.exp(sink - higher), mixed * shrink[:, None]
