"""Whisper's rules and the choice of the likeliest token in one kernel of a CUDA device.

One after the other, rules are some sixty passes over logits of 51,866 tokens; a step of one window takes as long for
them as for its layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from polymux.core.compute.device import send
from polymux.core.compute.triton.jit import kernel
from polymux.modalities.asr.rules import NONE

ALWAYS, AT_FIRST = 1, 2
"""Bits of a token in the table of what is suppressed."""

TILE = 4096


@triton.jit
def _gather(peak, total, where, values, columns):
    """Lane by lane, the likeliest of some logits (-inf where banned), where it stands, and the sum of exponentials."""
    better = values > peak
    higher = tl.where(better, values, peak)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    total = total * tl.exp(peak - safe) + tl.exp(values - safe)
    return higher, total, tl.where(better, columns, where)


@triton.jit
def _conclude(peak, total, where, width):
    """The same of all lanes together: the likeliest, the logarithm of the sum, and the first place of the likeliest."""
    best = tl.max(peak, axis=0)
    safe = tl.where(best == float("-inf"), 0.0, best)
    together = tl.log(tl.sum(total * tl.exp(peak - safe), axis=0)) + safe
    place = tl.min(tl.where(peak == best, where, width), axis=0)
    return best, tl.where(best == float("-inf"), float("-inf"), together), place


@kernel()
def _choose(
    logits,
    slots,
    fresh_states,
    stamp_states,
    suppressed,
    tokens,
    finite,
    logprobs,
    width,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    NO_TIMESTAMPS: tl.constexpr,
    LATEST: tl.constexpr,
    NOTHING: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    own = stamp_states + slot * 3
    fresh = tl.load(fresh_states + slot) != 0
    last = tl.load(own)
    before = tl.load(own + 1)
    stamp = tl.load(own + 2)
    after_stamp = last >= FIRST
    paired = (before == NOTHING) | (before >= FIRST)
    opened = after_stamp & (paired == 0)
    start = last == NOTHING
    floor = tl.where(stamp == NOTHING, FIRST, tl.where(opened, stamp, stamp + 1))
    ceiling = tl.where(start, LATEST, width)
    hidden = tl.where(fresh, 3, 1)
    sound = tl.full([TILE], 1, tl.int32)
    lanes = tl.arange(0, TILE)
    peak = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    where = tl.full([TILE], 0, tl.int32)
    for begin in range(0, FIRST, TILE):
        columns = begin + lanes
        here = columns < FIRST
        values = tl.load(logits + row * width + columns, here, other=0.0).to(tl.float32)
        sound = sound & tl.where(tl.abs(values) < float("inf"), 1, 0)
        banned = (tl.load(suppressed + columns, here, other=3).to(tl.int32) & hidden) != 0
        banned = banned | (columns == NO_TIMESTAMPS) | ((columns < END) & opened) | start
        peak, total, where = _gather(peak, total, where, tl.where(banned, float("-inf"), values), columns)
    text_best, text_sum, text_place = _conclude(peak, total, where, width)
    peak = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for begin in range(FIRST, width, TILE):
        columns = begin + lanes
        here = columns < width
        values = tl.load(logits + row * width + columns, here, other=0.0).to(tl.float32)
        sound = sound & tl.where(tl.abs(values) < float("inf"), 1, 0)
        banned = (tl.load(suppressed + columns, here, other=3).to(tl.int32) & hidden) != 0
        banned = banned | (after_stamp & paired) | (columns < floor) | (columns > ceiling)
        peak, total, where = _gather(peak, total, where, tl.where(banned, float("-inf"), values), columns)
    stamp_best, stamp_sum, stamp_place = _conclude(peak, total, where, width)
    only = stamp_sum > text_best
    chosen = tl.where(only | (stamp_best > text_best), stamp_place, text_place)
    best = tl.where(only, stamp_best, tl.maximum(stamp_best, text_best))
    higher = tl.maximum(text_sum, stamp_sum)
    every = higher + tl.log(tl.exp(text_sum - higher) + tl.exp(stamp_sum - higher))
    chosen = tl.minimum(chosen, width - 1).to(tl.int64)
    tl.store(tokens + row, chosen)
    tl.store(logprobs + row, best - tl.where(only, stamp_sum, every))
    tl.store(finite + row, tl.min(sound, axis=0) > 0)
    tl.store(fresh_states + slot, 0)
    tl.store(own, chosen)
    tl.store(own + 1, last)
    tl.store(own + 2, tl.where(chosen >= FIRST, chosen, stamp))


class WhisperChoice:
    """Suppressed tokens, those suppressed at first, and timestamps, in the order in which `Hearing` has them."""

    def __init__(
        self,
        vocabulary: int,
        suppressed_first: Sequence[int],
        suppressed: Sequence[int],
        first: int,
        end: int,
        no_timestamps: int,
        latest: int | None,
        device: torch.device,
    ) -> None:
        """`first`, `end`, `no_timestamps` and `latest` as `Timestamps` takes them."""
        table = np.zeros(vocabulary, np.int8)
        table[list(suppressed_first)] |= AT_FIRST
        table[list(suppressed)] |= ALWAYS
        self._suppressed = send(table, device)
        self._constants = (first, end, no_timestamps, vocabulary if latest is None else first + latest)

    def __call__(self, logits: Tensor, slots: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """As `Drawer.choose`. `states`: of the three rules, (slots, 1), (slots, 0) and (slots, 3), advanced."""
        rows, width = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
        logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
        _choose[(rows,)](
            logits,
            slots,
            states[0],
            states[2],
            self._suppressed,
            tokens,
            finite,
            logprobs,
            width,
            *self._constants,
            NONE,
            TILE,
            num_warps=16,
        )
        return tokens, finite, logprobs
