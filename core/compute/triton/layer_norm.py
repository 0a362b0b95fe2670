"""Layer norm with bias and residual, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polymux.core.compute.triton.jit import kernel


@kernel()
def _add_layer_norm(
    x, residual, weight, bias, out, total, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    value = tl.load(x + row * WIDTH + columns, mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * WIDTH + columns, mask, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + columns, rounded, mask)
        value = rounded.to(tl.float32)
    mean = tl.sum(value) / WIDTH
    centred = tl.where(mask, value - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred) / WIDTH + eps)
    factor = tl.load(weight + columns, mask, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, (centred * scale * factor + shift).to(out.dtype.element_ty), mask)


def add_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The layer norm of x + residual, (T, d), and the sum itself. Without a residual, of x alone."""
    x = x.contiguous()
    rows, width = x.shape
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    warps = min(16, max(1, block // 512))
    _add_layer_norm[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        bias,
        out,
        total,
        eps,
        width,
        block,
        residual is not None,
        num_warps=warps,
    )
    return out, total
