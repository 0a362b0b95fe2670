"""The steps of a decoder layer between its matrix products, in torch. A device may bring fused ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from polymux.core.compute.attention import AttentionBackend, AttentionContext, PagedBatch, PagedContext
from polymux.core.compute.fast.structure import Norm
from polymux.core.errors import InternalError

if TYPE_CHECKING:
    from polymux.core.compute.fast.decoder import FastLayer


HeadNorms = tuple[Norm, Norm]
"""Of queries and of keys."""


class Operations:
    """One instance serves one decoder; nothing is kept between calls."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """RMS norm of the last dimension."""
        if norm.weight.dtype == x.dtype:
            return rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
        return rms_norm(x.float(), norm.weight.shape, norm.weight, norm.eps).to(x.dtype)

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), both (T, d)."""
        residual = residual + x
        return self.norm(residual, norm), residual

    def add_layer_norm(self, x: Tensor, residual: Tensor, norm: nn.LayerNorm) -> Tensor:
        """norm(x + residual), both (T, d); `x` is used up."""
        return norm(x.add_(residual))

    def gate(self, act: nn.Module, gate_up: Tensor) -> Tensor:
        """act(gate) * up from (T, 2 i): (T, i)."""
        gate, up = gate_up.chunk(2, dim=-1)
        return act(gate) * up

    def attend(
        self,
        index: int,
        layer: FastLayer,
        merged: Tensor,
        heads: int,
        kv_heads: int,
        positions: Tensor,
        context: AttentionContext,
    ) -> Tensor:
        """From the merged projection (T, heads + 2 kv heads, dim), over norms and rotary, to (T, heads, dim).

        `positions` are what rotary turns by: (T,), or (axes, T).
        """
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        if isinstance(context, PagedContext) and self.writes_for(context.backend):
            cache = context.cache[:, index]
            query = self.rotate_write(merged, heads, norms, layer.rotary.find(positions), cache, context.batch)
            return context.backend.paged(query, cache, context.batch, layer.options)
        query, key, value = self.rotate(merged, [heads, kv_heads, kv_heads], norms, layer.rotary, positions)
        return context.attend(index, query, key, value, layer.options)

    def writes_for(self, backend: AttentionBackend) -> bool:
        """Whether `rotate_write` may write in the place of this backend."""
        return False

    def rotate_write(
        self,
        merged: Tensor,
        heads: int,
        norms: HeadNorms | None,
        turning: tuple[Tensor, Tensor],
        cache: Tensor,
        batch: PagedBatch,
    ) -> Tensor:
        """The queries (T, heads, dim) of a merged projection, over norms and rotary; keys and values go to their
        blocks of one layer's `cache`. `turning`: a table of cosines and sines, and each token's row of it."""
        raise InternalError(f"{type(self).__name__} does not write into blocks")

    def rotate(
        self, merged: Tensor, sizes: list[int], norms: HeadNorms | None, rotary: RotaryTable, positions: Tensor
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values of a merged projection, of `sizes` heads each, over norms and rotary. `merged` is
        used up."""
        query, key, value = merged.split(sizes, dim=1)
        if norms is not None:
            query, key = self.norm(query, norms[0]), self.norm(key, norms[1])
        cos, sin = rotary.at(positions)
        query, key = rotate(torch.cat([query, key], dim=1), cos, sin).split(sizes[:2], dim=1)
        return query, key, value

    def linear(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """A layer that multiplies by `weight` (out, in)."""
        kind = TallLinear if is_tall(weight) and bias is None else nn.Linear
        layer = kind(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        return layer


TALL = 8
"""A weight with so many times more outputs than inputs is a head."""


class TallLinear(nn.Linear):
    """A head on a CPU. torch computes x Wᵀ, and for that its library packs the whole of W for a few rows as for many;
    W xᵀ reads it as it lies: a quarter of the time for two rows, half for eight, and no more for any number."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight @ x.T).T.contiguous() if x.dim() == 2 else super().forward(x)


def is_tall(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.shape[0] >= TALL * weight.shape[1]


class RotaryTable:
    """Cosines and sines of every position, (2, positions, dim); the rows of one launch are looked up once.

    `axes`, (dim,) int64, is for models whose tokens stand at several positions at once (time, height, width): which
    of them turns each dimension.
    """

    def __init__(self, table: Tensor, axes: Tensor | None = None) -> None:
        self.table = table
        self.axes = axes
        self._positions: Tensor | None = None
        self._found: tuple[Tensor, Tensor] | None = None
        self._rows: tuple[Tensor, Tensor] | None = None

    def find(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """A table and which of its rows each token has, (T,) int64. Positions are (T,) or (axes, T)."""
        if positions.dim() == 1:
            return self.table, positions
        if self._found is None or self._positions is not positions:
            if self.axes is None:
                raise InternalError("positions of several axes were given to a model that has one")
            chosen = positions[self.axes].T
            table = torch.stack([self.table[0].gather(0, chosen), self.table[1].gather(0, chosen)])
            self._positions, self._rows = positions, None
            self._found = table, torch.arange(positions.shape[1], device=positions.device)
        return self._found

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(T, 1, dim) cosines and sines."""
        table, rows = self.find(positions)
        if self._rows is None or self._positions is not positions:
            cos, sin = table[:, rows]
            self._positions, self._rows = positions, (cos[:, None], sin[:, None])
        return self._rows


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021, section 3.4.2) in the half-split layout: (T, heads, dim)."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin


def recognise_gate(act: nn.Module, device: torch.device) -> str | None:
    """Which fused gate computes the same as `act`, found by trying it; None when none does."""
    x = torch.linspace(-6, 6, 97, device=device)
    found = act(x)
    if torch.allclose(found, torch.nn.functional.silu(x), atol=1e-5):
        return "silu"
    if torch.allclose(found, torch.nn.functional.gelu(x, approximate="tanh"), atol=1e-5):
        return "gelu_tanh"
    return None


def choose_operations(device: torch.device, dtype: torch.dtype) -> Operations:
    """Fused ones where the device has them."""
    if device.type == "cuda":
        from polymux.core.compute.triton.operations import TritonOperations

        return TritonOperations()
    if device.type == "cpu" and dtype == torch.float32:
        from polymux.core.compute.cpu.kernels import load_cpu_kernels
        from polymux.core.compute.cpu.operations import NativeOperations

        if kernels := load_cpu_kernels():
            return NativeOperations(kernels)
    return Operations()
