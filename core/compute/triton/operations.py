"""A decoder layer's steps in fused kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from polymux.core.compute.attention import AttentionContext, PagedContext
from polymux.core.compute.fast.operations import Operations, recognise_gate
from polymux.core.compute.fast.structure import Norm
from polymux.core.compute.triton.attention import TritonAttention
from polymux.core.compute.triton.fused import add_norm, gate, rotate_write
from polymux.core.compute.triton.layer_norm import add_layer_norm
from polymux.core.compute.triton.linear import CudaLinear
from polymux.core.compute.triton.packed import rotate_heads

if TYPE_CHECKING:
    from polymux.core.compute.fast.decoder import FastLayer


class TritonOperations(Operations):
    def __init__(self) -> None:
        self._kinds: dict[nn.Module, str | None] = {}

    def linear(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        return CudaLinear(weight, bias)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        if x.dim() != 2 or not x.is_contiguous():
            return super().norm(x, norm)
        return add_norm(x, None, norm.weight, norm.eps)

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return add_norm(x, residual, norm.weight, norm.eps), residual

    def add_layer_norm(self, x: Tensor, residual: Tensor, norm: nn.LayerNorm) -> Tensor:
        if norm.bias is None or not residual.is_contiguous():
            return super().add_layer_norm(x, residual, norm)
        return add_layer_norm(x, residual, norm.weight, norm.bias, norm.eps)[0]

    def gate(self, act: nn.Module, gate_up: Tensor) -> Tensor:
        if act not in self._kinds:
            self._kinds[act] = recognise_gate(act, gate_up.device)
        kind = self._kinds[act]
        return super().gate(act, gate_up) if kind is None else gate(gate_up, kind)

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
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = (layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps)
        turning = layer.rotary.find(positions)
        if not isinstance(context, PagedContext) or not isinstance(context.backend, TritonAttention):
            rotate_heads(merged, heads, kv_heads, turning, norms)
            query, key, value = merged.split([heads, kv_heads, kv_heads], dim=1)
            return context.attend(index, query, key, value, layer.options)
        cache = context.cache[:, index]
        query = rotate_write(merged, heads, kv_heads, turning, norms, cache, context.batch)
        return context.backend.paged(query, cache, context.batch, layer.options)
