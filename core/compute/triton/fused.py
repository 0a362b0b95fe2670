"""Elementwise steps of a decoder layer, each in one kernel: norm with residual, gating."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polymux.core.compute.triton.jit import kernel


@kernel()
def _add_norm(x, residual, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    value = tl.load(x + row * WIDTH + columns, mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * WIDTH + columns, mask, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row * WIDTH + columns, rounded, mask)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / WIDTH + eps)
    factor = tl.load(weight + columns, mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, (value * scale * factor).to(out.dtype.element_ty), mask)


def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x + residual, (T, d); the sum is left in `residual`. Without a residual, of x alone."""
    out = torch.empty_like(x)
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    target = x if residual is None else residual
    _add_norm[(x.shape[0],)](
        x, target, weight, out, eps, width, block, residual is not None, num_warps=min(16, max(1, block // 512))
    )
    return out


@kernel()
def _gate(gate_up, out, WIDTH, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + columns, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + columns, mask, other=0.0).to(tl.float32)
    if KIND == 0:
        gate = gate * tl.sigmoid(gate)
    else:  # the tanh form of GELU: tanh(z) = 2 sigmoid(2z) - 1
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * tl.sigmoid(2.0 * inner)
    tl.store(out + row * WIDTH + columns, (gate * up).to(out.dtype.element_ty), mask)


GATES = {"silu": 0, "gelu_tanh": 1}


def gate(gate_up: Tensor, kind: str) -> Tensor:
    """act(gate) * up from (T, 2 i), gate first: (T, i)."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _gate[(rows, triton.cdiv(width, 1024))](gate_up, out, width, GATES[kind], 1024, num_warps=4)
    return out
