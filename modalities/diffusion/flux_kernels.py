"""FLUX's elementwise steps in kernels of our own: nothing is compiled for a shape, and nothing is written twice.

Per token and block the compiler's fusions move 114 KiB (single) and 138 KiB or more (double) of FLUX.1-dev's; these
move 66 and 102: heads are normalised, turned and laid beside the other stream's in one pass, in place where they may
stay, and the activation needs no pass of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.functional import gelu

from polymux.modalities.diffusion.merged_flux import EPS, MergedFluxDouble, Steps, Stream

HEADS_TOGETHER = 8
"""Heads of one token that a program turns."""


@triton.jit
def _normalise(
    hidden, more, gate, shift, scale, summed, out, tokens, gate_stride, stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = token // tokens
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    value = tl.load(hidden + token * WIDTH + columns, mask, other=0.0).to(tl.float32)
    if ADD:
        factor = tl.load(gate + row * gate_stride + columns, mask, other=0.0).to(tl.float32)
        value += factor * tl.load(more + token * WIDTH + columns, mask, other=0.0).to(tl.float32)
        rounded = value.to(summed.dtype.element_ty)
        tl.store(summed + token * WIDTH + columns, rounded, mask)
        value = rounded.to(tl.float32)
    mean = tl.sum(value) / WIDTH
    centred = tl.where(mask, value - mean, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred) / WIDTH + eps)
    factor = 1.0 + tl.load(scale + row * stride + columns, mask, other=0.0).to(tl.float32)
    offset = tl.load(shift + row * stride + columns, mask, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + columns, (normed * factor + offset).to(out.dtype.element_ty), mask)


@triton.jit
def _add(hidden, more, gate, out, tokens, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    factor = tl.load(gate + token // tokens * stride + columns, mask, other=0.0).to(tl.float32)
    value = tl.load(hidden + token * WIDTH + columns, mask, other=0.0).to(tl.float32)
    value += factor * tl.load(more + token * WIDTH + columns, mask, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + columns, value.to(out.dtype.element_ty), mask)


@triton.jit
def _turn_heads(value, weight, cos, sin, eps, HEADS: tl.constexpr, DIM: tl.constexpr):
    """(HEADS, DIM) float32, normalised and turned by (DIM / 2,) angles of neighbours."""
    normed = value * tl.rsqrt(tl.sum(value * value, axis=1) / DIM + eps)[:, None] * weight[None, :]
    first, second = tl.split(tl.reshape(normed, (HEADS, DIM // 2, 2)))
    turned = tl.join(first * cos[None, :] - second * sin[None, :], first * sin[None, :] + second * cos[None, :])
    return tl.reshape(turned, (HEADS, DIM))


@triton.jit
def _turn(
    projected, query_weight, key_weight, cosines, sines, out, tokens, offset, row_stride, stride, out_row, out_stride,
    eps, HEADS: tl.constexpr, DIM: tl.constexpr, TOGETHER: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row, token = (place // tokens).to(tl.int64), place % tokens
    head = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, DIM)
    half = tl.arange(0, DIM // 2)
    mask = (head < HEADS)[:, None] & (column >= 0)[None, :]
    own = head[:, None] * DIM + column[None, :]
    source = projected + row * row_stride + token.to(tl.int64) * stride + own
    target = out + row * out_row + (offset + token).to(tl.int64) * out_stride + own
    cos = tl.load(cosines + (offset + token) * (DIM // 2) + half)
    sin = tl.load(sines + (offset + token) * (DIM // 2) + half)
    query = tl.load(source, mask, other=0.0).to(tl.float32)
    query = _turn_heads(query, tl.load(query_weight + column).to(tl.float32), cos, sin, eps, TOGETHER, DIM)
    tl.store(target, query.to(out.dtype.element_ty), mask)
    key = tl.load(source + HEADS * DIM, mask, other=0.0).to(tl.float32)
    key = _turn_heads(key, tl.load(key_weight + column).to(tl.float32), cos, sin, eps, TOGETHER, DIM)
    tl.store(target + HEADS * DIM, key.to(out.dtype.element_ty), mask)
    if COPY:
        value = tl.load(source + 2 * HEADS * DIM, mask, other=0.0)
        tl.store(target + 2 * HEADS * DIM, value, mask)


@triton.jit
def _join(joined, inner, out, stride, LEFT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    left, right = columns < LEFT, (columns >= LEFT) & (columns < WIDTH)
    kept = tl.load(joined + token * LEFT + columns, left, other=0.0).to(tl.float32)
    value = tl.load(inner + token * stride + columns - LEFT, right, other=0.0).to(tl.float32)
    # the tanh form of GELU: tanh(z) = 2 sigmoid(2z) - 1
    value = value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    tl.store(out + token * WIDTH + columns, tl.where(left, kept, value).to(out.dtype.element_ty), columns < WIDTH)


class KernelSteps(Steps):
    """One kernel a step. Modulations are columns of one wide matrix: their rows are a stride apart."""

    def __init__(self, *, split: bool = True, epilogue: bool = True, beside: bool = True) -> None:
        """`epilogue`: the activation belongs to the matrix product that it follows, where the library can.
        `beside`: the text's part of a lone picture runs on a stream of its own, as neither fills the card."""
        self.split = split
        self.epilogue = epilogue
        self.beside = beside
        self._side: torch.cuda.Stream | None = None
        self._parted = False

    def run_double(
        self, double: MergedFluxDouble, hidden: Tensor, text: Tensor, parts: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        if not (self.beside and hidden.is_cuda and len(hidden) == 1):
            return super().run_double(double, hidden, text, parts, cos, sin)
        self._side = self._side or torch.cuda.Stream()
        main, side = torch.cuda.current_stream(), self._side
        own, texts = parts.chunk(2, -1)
        for shared in (text, parts):
            shared.record_stream(side)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            of_text = double.text.project(text, texts)
        of_picture = double.picture.project(hidden, own)
        main.wait_stream(side)
        of_text[0].record_stream(main)
        text_seen, seen = double.attend([of_text, of_picture], text.shape[1], cos, sin)
        text_seen.record_stream(side)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            text = double.text.finish(text, text_seen, texts)
        self._parted = True
        return double.picture.finish(hidden, seen, own), text

    def settle(self, text: Tensor) -> None:
        if self._parted and self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
            text.record_stream(torch.cuda.current_stream())
            self._parted = False  # a graph may not wait for a stream that had no part in it

    def normalise(self, hidden: Tensor, shift: Tensor, scale: Tensor, eps: float = EPS) -> Tensor:
        return self._normalise(hidden, None, shift, shift, scale, eps)[1]

    def add_normalise(
        self, hidden: Tensor, more: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, eps: float = EPS
    ) -> tuple[Tensor, Tensor]:
        return self._normalise(hidden, more, gate, shift, scale, eps)

    def _normalise(
        self, hidden: Tensor, more: Tensor | None, gate: Tensor, shift: Tensor, scale: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        hidden = hidden.contiguous()
        rows, tokens, width = hidden.shape
        out = torch.empty_like(hidden)
        summed = hidden if more is None else torch.empty_like(hidden)
        block = triton.next_power_of_2(width)
        _normalise[(rows * tokens,)](
            hidden, hidden if more is None else more.contiguous(), gate, shift, scale, summed, out, tokens,
            gate.stride(0), shift.stride(0), eps, width, block, more is not None,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
        return summed, out

    def add(self, hidden: Tensor, more: Tensor, gate: Tensor) -> Tensor:
        hidden, more = hidden.contiguous(), more.contiguous()
        rows, tokens, width = hidden.shape
        out = torch.empty_like(hidden)
        block = min(1024, triton.next_power_of_2(width))
        grid = (rows * tokens, triton.cdiv(width, block))
        _add[grid](hidden, more, gate, out, tokens, gate.stride(0), width, block, num_warps=4)
        return out

    def turn(self, streams: Sequence[Stream], eps: float, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dim = streams[0][1].shape[0]
        rows, _, width = streams[0][0].shape
        if len(streams) == 1:  # what was projected may be overwritten, and values stay where they are
            out = streams[0][0].unflatten(-1, (3, -1, dim))
        else:
            total = sum(projected.shape[1] for projected, _, _ in streams)
            out = streams[0][0].new_empty(rows, total, 3, width // 3 // dim, dim)
        offset, heads = 0, out.shape[3]
        together = min(HEADS_TOGETHER, triton.next_power_of_2(heads))
        for projected, query_weight, key_weight in streams:
            tokens = projected.shape[1]
            _turn[(rows * tokens, triton.cdiv(heads, together))](
                projected, query_weight, key_weight, cos, sin, out, tokens, offset, projected.stride(0),
                projected.stride(1), out.stride(0), out.stride(1), eps, heads, dim, together, len(streams) > 1,
                num_warps=4,
            )  # fmt: skip
            offset += tokens
        query, key, value = out.unbind(2)
        return query, key, value

    def join(self, joined: Tensor, inner: Tensor) -> Tensor:
        joined = joined.contiguous()
        left, width = joined.shape[-1], joined.shape[-1] + inner.shape[-1]
        out = joined.new_empty(*joined.shape[:-1], width)
        block = min(1024, triton.next_power_of_2(width))
        grid = (joined.shape[0] * joined.shape[1], triton.cdiv(width, block))
        _join[grid](joined, inner, out, inner.stride(1), left, width, block, num_warps=4)
        return out

    def activate(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        if not (self.epilogue and hidden.is_cuda and isinstance(layer, nn.Linear) and layer.bias is not None):
            return gelu(layer(hidden), approximate="tanh")
        flat = torch._addmm_activation(layer.bias, hidden.flatten(0, -2), layer.weight.T, use_gelu=True)
        return flat.unflatten(0, hidden.shape[:-1])
