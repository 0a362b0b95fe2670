"""Products of a few rows with a weight: bound by reading the weight once, which a matrix product's tiles do not reach.

Every program reads whole rows of the weight in wide stretches and keeps their sums in registers. What comes right
before or behind a product (a layer norm, GELU, the sum with the residual stream) is done in its programs: with so few
rows a kernel of its own would take as long as the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.functional import linear

from polymux.core.compute.triton.jit import kernel

FEW = 4
"""Rows up to which a weight is read row by row."""

PER_PROGRAM = 2
"""Outputs of one program: measured best on an H200 for weights of 4 MB to 1.2 GB."""

PER_NORMED = 4
"""The same where each program norms the rows: more of them share that."""


WIDEST = 2048
"""Columns up to which a program norms its rows by itself: it keeps a whole one."""


@triton.jit
def finish(result, bias, residual, row, outs, here, OUT, BIAS: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr):
    """Outputs of one row: the bias, GELU (with the error function, Hendrycks and Gimpel 2016), the residual stream."""
    if BIAS:
        result += tl.load(bias + outs, here, other=0.0).to(tl.float32)
    if GELU:
        result = 0.5 * result * (1.0 + tl.erf(result * 0.7071067811865476))
    if ADD:
        result += tl.load(residual + row * OUT + outs, here, other=0.0).to(tl.float32)
    return result


@kernel()
def _multiply(
    x,
    weight,
    bias,
    residual,
    out,
    WIDTH,
    OUT,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    TILE: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    here = outs < OUT
    lanes = tl.arange(0, TILE)
    for row in tl.static_range(ROWS):
        total = tl.zeros([OUTS, TILE], tl.float32)
        for start in range(0, WIDTH, TILE):
            columns = start + lanes
            mask = columns < WIDTH
            value = tl.load(x + row * WIDTH + columns, mask, other=0.0).to(tl.float32)
            where = weight + outs[:, None].to(tl.int64) * WIDTH + columns[None, :]
            # later rows find the stretch in the cache
            part = tl.load(where, here[:, None] & mask[None, :], other=0.0).to(tl.float32)
            total += part * value[None, :]
        result = finish(tl.sum(total, axis=1), bias, residual, row, outs, here, OUT, BIAS, False, ADD)
        tl.store(out + row * OUT + outs, result.to(out.dtype.element_ty), here)


@kernel()
def _norm_multiply(
    x,
    norm_weight,
    norm_bias,
    weight,
    bias,
    out,
    eps,
    OUT,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
):
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    here = outs < OUT
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    # on its way while the rows are normed
    where = weight + outs[:, None].to(tl.int64) * WIDTH + columns[None, :]
    part = tl.load(where, here[:, None] & mask[None, :], other=0.0)
    factor = tl.load(norm_weight + columns, mask, other=0.0).to(tl.float32)
    shift = tl.load(norm_bias + columns, mask, other=0.0).to(tl.float32)
    for row in tl.static_range(ROWS):
        value = tl.load(x + row * WIDTH + columns, mask, other=0.0).to(tl.float32)
        centred = tl.where(mask, value - tl.sum(value) / WIDTH, 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred) / WIDTH + eps)
        normed = (centred * scale * factor + shift).to(x.dtype.element_ty).to(tl.float32)
        total = tl.sum(part.to(tl.float32) * normed[None, :], axis=1)
        result = finish(total, bias, x, row, outs, here, OUT, BIAS, GELU, False)
        tl.store(out + row * OUT + outs, result.to(out.dtype.element_ty), here)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """x (rows, in) @ weight (out, in).T + bias (out,) + residual (rows, out), for up to `FEW` rows: (rows, out)."""
    rows, width = x.shape
    outs = weight.shape[0]
    out = x.new_empty(rows, outs)
    _multiply[(triton.cdiv(outs, PER_PROGRAM),)](
        x,
        weight,
        bias if bias is not None else weight,
        residual if residual is not None else weight,
        out,
        width,
        outs,
        rows,
        PER_PROGRAM,
        1024,
        bias is not None,
        residual is not None,
        num_warps=4,
    )
    return out


def norm_multiply(x: Tensor, norm: nn.LayerNorm, weight: Tensor, bias: Tensor | None, *, gelu: bool = False) -> Tensor:
    """The layer norm of x (rows, in) @ weight (out, in).T + bias (out,), perhaps through GELU: (rows, out).

    For up to `FEW` rows of up to `WIDEST` numbers.
    """
    rows, width = x.shape
    outs = weight.shape[0]
    out = x.new_empty(rows, outs)
    _norm_multiply[(triton.cdiv(outs, PER_NORMED),)](
        x,
        norm.weight,
        norm.bias,
        weight,
        bias if bias is not None else weight,
        out,
        norm.eps,
        outs,
        width,
        triton.next_power_of_2(width),
        rows,
        PER_NORMED,
        bias is not None,
        gelu,
        num_warps=4,
    )
    return out


class CudaLinear(nn.Module):
    """A linear layer for inference: `weight` (out, in), `bias` (out,) or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight.contiguous(), persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2 and x.shape[0] <= FEW and x.is_contiguous() and x.dtype != torch.float32:
            return multiply(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)
