"""Wan's block with its elementwise steps in kernels of our own: nothing is compiled for a shape.

The steps between two products are FLUX's. What differs are the norms of query and key, which are over all heads at
once, and the norm before the text is read, which has weights in place of a modulation.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from polymux.core.batch.denoiser import Wrap, keep_layer
from polymux.modalities.diffusion.flux_kernels import KernelSteps
from polymux.modalities.diffusion.merged import MergedWan, attend


@triton.jit
def _turn_whole(
    states, weights, cosines, sines, tokens, stride, eps,
    WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    place = states + token * stride + part * WIDTH + columns
    value = tl.load(place, mask, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value) / WIDTH + eps)
    value *= tl.load(weights + part * WIDTH + columns, mask, other=0.0).to(tl.float32)
    if TURN:
        pair = tl.arange(0, BLOCK // 2)
        angle = (token % tokens) * HALF + pair % HALF
        cos = tl.load(cosines + angle, pair < WIDTH // 2, other=0.0)
        sin = tl.load(sines + angle, pair < WIDTH // 2, other=0.0)
        first, second = tl.split(tl.reshape(value, (BLOCK // 2, 2)))
        value = tl.reshape(tl.join(first * cos - second * sin, first * sin + second * cos), (BLOCK,))
    tl.store(place, value.to(states.dtype.element_ty), mask)


def turn_whole(
    states: Tensor, weights: Tensor, eps: float, cos: Tensor | None = None, sin: Tensor | None = None
) -> None:
    """Normalise the first columns of `states`, (P, T, any) contiguous, in place: each row of `weights`, (parts, dim),
    is of one part, normalised over all its heads, then turned by the angles, (T, 1, head dim / 2) float32, if any."""
    parts, width = weights.shape
    rows, tokens, stride = states.shape
    block = triton.next_power_of_2(width)
    half = 1 if cos is None else cos.shape[-1]
    _turn_whole[(rows * tokens, parts)](
        states, weights, cos, sin, tokens, stride, eps, width, half, block, cos is not None,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip


class KernelWan(MergedWan):
    """`MergedWan`, whose block must have a norm with weights before it reads the text."""

    def __init__(self, block: Any, steps: KernelSteps, wrap: Wrap = keep_layer) -> None:
        super().__init__(block, wrap)
        self.steps = steps
        self.norms = torch.stack([self.query.weight, self.key.weight]).detach()
        self.reading = torch.stack([self.text_norm.bias, self.text_norm.weight - 1]).detach().float()
        """What is a shift and a scale to others."""
        self.whole = torch.ones_like(self.reading[:1])

    def forward(self, hidden: Tensor, text: Tensor, modulation: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As `MergedWan` does."""
        steps, rows = self.steps, len(hidden)
        shift, scale, gate, low, high, last = (self.table + modulation.float()).unbind(1)
        states = self.states(steps.normalise(hidden, shift, scale, self.eps))
        turn_whole(states, self.norms, self.query.eps, cos, sin)
        joined = attend(*states.unflatten(-1, (3, self.heads, -1)).unbind(2))
        ahead, factor = (each.expand(rows, -1) for each in self.reading)
        hidden, read = steps.add_normalise(hidden, self.out(joined), gate, ahead, factor, self.text_norm.eps)
        asked = self.text_query(read)
        turn_whole(asked, self.text_query_norm.weight[None], self.text_query_norm.eps)
        known = self.text_states(text)
        turn_whole(known, self.text_key_norm.weight[None], self.text_key_norm.eps)
        key, value = known.chunk(2, -1)
        more = self.text_out(attend(self._split(asked), self._split(key), self._split(value)))
        hidden, read = steps.add_normalise(hidden, more, self.whole.expand(rows, -1), low, high, self.eps)
        return steps.add(hidden, self.down(steps.activate(self.up, read)), last)
