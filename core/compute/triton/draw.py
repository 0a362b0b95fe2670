"""Greedy choice and temperature sampling in one pass over the logits.

Adding Gumbel noise to logits / temperature and taking the largest draws from their softmax (Gumbel 1954). The noise of
a row depends only on (seed, position, token): neighbours never matter, and no sum over the vocabulary is needed.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from polymux.core.compute.triton.jit import kernel

TILE = 1024
PARTS = 8
"""Programs per row; a second kernel takes the best of their choices."""


@kernel()
def _draw(logits, temperatures, seeds, slots, positions, peaks, choices, sounds, width, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    temperature = tl.load(temperatures + slot)
    seed = tl.load(seeds + slot) + (position + 1) * -7046029254386353131
    seed = (seed ^ (seed >> 30)) * -4658895280553007687
    seed = seed ^ (seed >> 27)
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    best = tl.full([TILE], float("-inf"), tl.float32)
    where = tl.full([TILE], width, tl.int32)
    sound = tl.full([TILE], 1, tl.int32)
    for start in range(part * 4 * TILE, width, parts * 4 * TILE):
        lanes = start + tl.arange(0, TILE)
        # Philox makes four numbers at a time, one for each quarter of the stretch; 7 rounds pass BigCrush (Salmon 2011)
        noise = tl.rand4x(seed, lanes, n_rounds=7)
        for quarter in tl.static_range(4):
            columns = lanes + quarter * TILE
            mask = columns < width
            value = tl.load(logits + row * width + columns, mask, other=0.0).to(tl.float32)
            sound = sound & tl.where(tl.abs(value) < float("inf"), 1, 0)
            value = value * inverse
            if temperature > 0:
                value = value - tl.log(-tl.log(tl.maximum(noise[quarter], 1e-10)))
            value = tl.where(mask, value, float("-inf"))
            better = value > best
            best = tl.where(better, value, best)
            where = tl.where(better, columns, where)
    peak = tl.max(best, axis=0)
    tl.store(peaks + row * parts + part, peak)
    tl.store(choices + row * parts + part, tl.min(tl.where(best == peak, where, width), axis=0))
    tl.store(sounds + row * parts + part, tl.min(sound, axis=0))


@kernel()
def _choose(peaks, choices, sounds, tokens, finite, width, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    parts = row * PARTS + tl.arange(0, PARTS)
    peak = tl.load(peaks + parts)
    choice = tl.load(choices + parts)
    chosen = tl.min(tl.where(peak == tl.max(peak, axis=0), choice, width), axis=0)
    tl.store(tokens + row, tl.minimum(chosen, width - 1).to(tl.int64))
    tl.store(finite + row, tl.min(tl.load(sounds + parts), axis=0) > 0)


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
    peaks = torch.empty(rows, PARTS, dtype=torch.float32, device=logits.device)
    choices = torch.empty(rows, PARTS, dtype=torch.int32, device=logits.device)
    sounds = torch.empty_like(choices)
    _draw[(rows, PARTS)](
        logits, temperatures, seeds, slots, positions, peaks, choices, sounds, width, TILE, num_warps=8
    )
    _choose[(rows,)](peaks, choices, sounds, tokens, finite, width, PARTS, num_warps=1)
    return tokens, finite
