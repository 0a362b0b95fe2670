"""A UNet's elementwise steps in kernels of our own, so that nothing is compiled for any of its many shapes.

torch norms groups over pixels channel by channel only, and copies what lies otherwise there and back around every
convolution. These kernels read pixels as the convolutions leave them. What is added before a norm (a convolution's
bias, the timestep) is folded into its factors, and the norms of transformer blocks are FLUX's kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear, silu

from polymux.modalities.diffusion.flux_kernels import KernelSteps
from polymux.modalities.diffusion.merged import attend

CHANNELS = 64
"""Channels of a program."""

PIXELS = 32
"""Pixels that a program reads at once."""

SPAN = 256
"""Pixels of a program that adds up."""


@triton.jit
def _add_up(
    pixels, sums, count, spans,
    WIDTH: tl.constexpr, SPAN: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Of every span and channel: the sum, and the sum of squares."""
    place = tl.program_id(0).to(tl.int64)
    row, span = place // spans, place % spans
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros((CHANNELS,), tl.float32)
    squares = tl.zeros((CHANNELS,), tl.float32)
    for start in range(0, SPAN, PIXELS):
        pixel = span * SPAN + start + tl.arange(0, PIXELS)
        mask = (pixel < count)[:, None] & (channel < WIDTH)[None, :]
        value = tl.load(pixels + (row * count + pixel)[:, None] * WIDTH + channel[None, :], mask, other=0.0)
        value = value.to(tl.float32)
        total += tl.sum(value, 0)
        squares += tl.sum(value * value, 0)
    tl.store(sums + place * 2 * WIDTH + channel, total, channel < WIDTH)
    tl.store(sums + (place * 2 + 1) * WIDTH + channel, squares, channel < WIDTH)


@triton.jit
def _find_factors(
    sums, more, weight, bias, factors, count, spans, eps,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """Of every channel of one group: what a pixel is multiplied with, and what is then added."""
    row = tl.program_id(0).to(tl.int64)
    own = tl.arange(0, BLOCK)
    channel = tl.program_id(1) * SIZE + own
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, spans, TOGETHER):
        span = start + tl.arange(0, TOGETHER)
        mask = (span < spans)[:, None] & (own < SIZE)[None, :]
        place = sums + (row * spans + span)[:, None] * 2 * WIDTH + channel[None, :]
        total += tl.sum(tl.load(place, mask, other=0.0), 0)
        squares += tl.sum(tl.load(place + WIDTH, mask, other=0.0), 0)
    mask = own < SIZE
    offset = tl.zeros((BLOCK,), tl.float32)
    if MORE:
        offset = tl.load(more + row * WIDTH + channel, mask, other=0.0).to(tl.float32)
        squares += offset * (2 * total + count * offset)
        total += count * offset
    mean = tl.sum(total) / (count * SIZE)
    variance = tl.maximum(tl.sum(squares) / (count * SIZE) - mean * mean, 0.0)
    factor = tl.rsqrt(variance + eps) * tl.load(weight + channel, mask, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask, other=0.0).to(tl.float32) + (offset - mean) * factor
    tl.store(factors + row * 2 * WIDTH + channel, factor, mask)
    tl.store(factors + (row * 2 + 1) * WIDTH + channel, shift, mask)


@triton.jit
def _apply(
    pixels, factors, out, count,
    WIDTH: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, ACTIVATE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = (pixel < count)[:, None] & (channel < WIDTH)[None, :]
    place = (row * count + pixel)[:, None] * WIDTH + channel[None, :]
    factor = tl.load(factors + row * 2 * WIDTH + channel, channel < WIDTH, other=0.0)
    shift = tl.load(factors + (row * 2 + 1) * WIDTH + channel, channel < WIDTH, other=0.0)
    value = tl.load(pixels + place, mask, other=0.0).to(tl.float32) * factor[None, :] + shift[None, :]
    if ACTIVATE:
        value = value * tl.sigmoid(value)
    tl.store(out + place, value.to(out.dtype.element_ty), mask)


@triton.jit
def _add_biased(
    left, right, bias, out, count, WIDTH: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    pixel = (tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = (pixel < count)[:, None] & (channel < WIDTH)[None, :]
    place = pixel[:, None] * WIDTH + channel[None, :]
    value = tl.load(left + place, mask, other=0.0).to(tl.float32) + tl.load(right + place, mask, other=0.0)
    value += tl.load(bias + channel, channel < WIDTH, other=0.0).to(tl.float32)[None, :]
    tl.store(out + place, value.to(out.dtype.element_ty), mask)


@triton.jit
def _gate(states, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    value = tl.load(states + token * 2 * WIDTH + column, mask, other=0.0).to(tl.float32)
    gate = tl.load(states + token * 2 * WIDTH + WIDTH + column, mask, other=0.0).to(tl.float32)
    value *= 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    tl.store(out + token * WIDTH + column, value.to(out.dtype.element_ty), mask)


def norm_groups(
    pixels: Tensor, norm: nn.GroupNorm | KernelNorm, more: Tensor | None = None, *, activate: bool
) -> Tensor:
    """`norm` of (P, channels, height, width) in channels-last order, or of that plus `more`, (P, channels), if given;
    then SiLU, if asked."""
    pixels = pixels.contiguous(memory_format=torch.channels_last)
    rows, width, height, across = pixels.shape
    count, size = height * across, width // norm.num_groups
    spans, blocks = triton.cdiv(count, SPAN), triton.cdiv(width, CHANNELS)
    sums = torch.empty(rows, spans, 2, width, dtype=torch.float32, device=pixels.device)
    factors = torch.empty(rows, 2, width, dtype=torch.float32, device=pixels.device)
    out = torch.empty_like(pixels)
    _add_up[(rows * spans, blocks)](pixels, sums, count, spans, width, SPAN, PIXELS, CHANNELS, num_warps=4)
    _find_factors[(rows, norm.num_groups)](
        sums, more, norm.weight, norm.bias, factors, count, spans, norm.eps, width, size,
        triton.next_power_of_2(size), 16, more is not None, num_warps=4,
    )  # fmt: skip
    grid = (triton.cdiv(count, PIXELS), blocks, rows)
    _apply[grid](pixels, factors, out, count, width, PIXELS, CHANNELS, activate, num_warps=4)
    return out


def add_biased(left: Tensor, right: Tensor, bias: Tensor) -> Tensor:
    """Sum of two (P, channels, height, width) in channels-last order, and (channels,)."""
    left, right = (each.contiguous(memory_format=torch.channels_last) for each in (left, right))
    rows, width, height, across = left.shape
    out = torch.empty_like(left)
    count = rows * height * across
    grid = (triton.cdiv(count, PIXELS), triton.cdiv(width, CHANNELS))
    _add_biased[grid](left, right, bias, out, count, width, PIXELS, CHANNELS, num_warps=4)
    return out


def gate_halves(states: Tensor) -> Tensor:
    """The first half of (P, T, 2 * width) by GELU of the second."""
    rows, tokens, width = states.shape
    width //= 2
    out = states.new_empty(rows, tokens, width)
    block = min(1024, triton.next_power_of_2(width))
    _gate[(rows * tokens, triton.cdiv(width, block))](states.contiguous(), out, width, block, num_warps=4)
    return out


class KernelNorm(nn.Module):
    """A group norm, with the SiLU that follows it if `activate`."""

    def __init__(self, norm: nn.GroupNorm, *, activate: bool) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.num_groups: int = norm.num_groups
        self.eps: float = norm.eps
        self.activate = activate

    def forward(self, pixels: Tensor) -> Tensor:
        """Of (P, channels, height, width)."""
        return norm_groups(pixels, self, activate=self.activate)


class KernelResnet(nn.Module):
    """`ResnetBlock2D` of a UNet: no change of size, the timestep added."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.first, self.second = block.norm1, block.norm2
        self.inward, self.outward = block.conv1, block.conv2
        self.time, self.beside = block.time_emb_proj, block.conv_shortcut
        self.early = (block.time_emb_proj.bias + block.conv1.bias).detach()
        biases = [layer.bias for layer in (block.conv2, block.conv_shortcut) if layer is not None]
        self.late = torch.stack([bias.detach() for bias in biases if bias is not None]).sum(0)

    def forward(self, pixels: Tensor, time: Tensor) -> Tensor:
        """(P, channels, height, width) and (P, time channels)."""
        inner = conv2d(norm_groups(pixels, self.first, activate=True), self.inward.weight, padding=1)
        more = linear(silu(time), self.time.weight, self.early)
        inner = conv2d(norm_groups(inner, self.second, more, activate=True), self.outward.weight, padding=1)
        kept = pixels if self.beside is None else conv2d(pixels, self.beside.weight)
        return add_biased(inner, kept, self.late)


class KernelTransformer(nn.Module):
    """`BasicTransformerBlock` of a UNet, its projections merged: over the pixels, over the text, then the MLP."""

    def __init__(self, block: Any, steps: KernelSteps) -> None:
        super().__init__()
        self.steps = steps
        self.own, self.text = block.attn1, block.attn2
        self.up, self.down = block.ff.net[0].proj, block.ff.net[2]
        norms = (block.norm1, block.norm2, block.norm3)
        self.eps: list[float] = [norm.eps for norm in norms]
        self.norms = [torch.stack([norm.bias.float(), norm.weight.float() - 1]).detach() for norm in norms]
        """Shift and scale of each."""
        self.whole = torch.ones_like(self.norms[0][:1])

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, **_: Any) -> Tensor:
        """(P, pixels, dim) and (P, text tokens, text dim)."""
        hidden, rows = hidden_states, len(hidden_states)
        first, second, third = ([each.expand(rows, -1) for each in norm] for norm in self.norms)
        whole = self.whole.expand(rows, -1)
        own, text = self.own, self.text
        query, key, value = own.to_qkv(self.steps.normalise(hidden, *first, self.eps[0])).chunk(3, -1)
        seen = own.to_out[0](self._attend(own, query, key, value))
        hidden, read = self.steps.add_normalise(hidden, seen, whole, *second, self.eps[1])
        key, value = text.to_kv(encoder_hidden_states).chunk(2, -1)
        seen = text.to_out[0](self._attend(text, text.to_q(read), key, value))
        hidden, read = self.steps.add_normalise(hidden, seen, whole, *third, self.eps[2])
        return hidden + self.down(gate_halves(self.up(read)))

    def _attend(self, attention: Any, *states: Tensor) -> Tensor:
        query, key, value = (each.unflatten(-1, (attention.heads, -1)) for each in states)
        return attend(query, key, value)
