"""Greedy choice and temperature sampling in one pass over the logits.

Adding Gumbel noise to logits / temperature and taking the largest draws from their softmax (Gumbel 1954). The noise of
a row depends only on (seed, position, token): neighbours never matter, and no sum over the vocabulary is needed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096


@triton.jit
def _draw(logits, temperatures, seeds, slots, positions, tokens, finite, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    temperature = tl.load(temperatures + slot)
    seed = tl.load(seeds + slot) + (position + 1) * -7046029254386353131
    seed = (seed ^ (seed >> 30)) * -4658895280553007687
    seed = seed ^ (seed >> 27)
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    best = tl.full([TILE], float("-inf"), tl.float32)
    where = tl.zeros([TILE], tl.int32)
    sound = tl.full([TILE], 1, tl.int32)
    for start in range(0, width, TILE):
        columns = start + tl.arange(0, TILE)
        mask = columns < width
        value = tl.load(logits + row * width + columns, mask, other=0.0).to(tl.float32)
        sound = sound & tl.where(tl.abs(value) < float("inf"), 1, 0)
        value = value * inverse
        if temperature > 0:
            uniform = tl.rand(seed, columns)
            value = value - tl.log(-tl.log(tl.maximum(uniform, 1e-10)))
        value = tl.where(mask, value, float("-inf"))
        better = value > best
        best = tl.where(better, value, best)
        where = tl.where(better, columns, where)
    peak = tl.max(best, axis=0)
    chosen = tl.min(tl.where(best == peak, where, width), axis=0)
    tl.store(tokens + row, tl.minimum(chosen, width - 1).to(tl.int64))
    tl.store(finite + row, tl.min(sound, axis=0) > 0)


def draw(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, slots: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens (R,) int64 and whether each row's logits were finite (R,) bool, from (R, vocabulary) logits.

    `temperatures` (float32; 0 is greedy) and `seeds` (int64) are looked up by slot; `positions` are the places the
    tokens will have.
    """
    rows, width = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    _draw[(rows,)](logits, temperatures, seeds, slots, positions, tokens, finite, width, TILE, num_warps=8)
    return tokens, finite
