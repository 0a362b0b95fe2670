"""A decoder layer's steps in fused kernels."""

from __future__ import annotations

from torch import Tensor, nn

from polymux.core.compute.attention import AttentionBackend, PagedBatch
from polymux.core.compute.fast.operations import HeadNorms, Operations, RotaryTable, recognise_gate
from polymux.core.compute.fast.structure import Norm
from polymux.core.compute.triton.attention import TritonAttention
from polymux.core.compute.triton.fused import add_norm, gate
from polymux.core.compute.triton.layer_norm import add_layer_norm
from polymux.core.compute.triton.linear import CudaLinear
from polymux.core.compute.triton.rotary import Weights, rotate_heads, rotate_write


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

    def writes_for(self, backend: AttentionBackend) -> bool:
        return isinstance(backend, TritonAttention)

    def rotate_write(
        self,
        merged: Tensor,
        heads: int,
        norms: HeadNorms | None,
        turning: tuple[Tensor, Tensor],
        cache: Tensor,
        batch: PagedBatch,
    ) -> Tensor:
        kv_heads = (merged.shape[1] - heads) // 2
        return rotate_write(merged, heads, kv_heads, turning, read_weights(norms), cache, batch)

    def rotate(
        self, merged: Tensor, sizes: list[int], norms: HeadNorms | None, rotary: RotaryTable, positions: Tensor
    ) -> tuple[Tensor, ...]:
        rotate_heads(merged, sizes[0], sizes[1], rotary.find(positions), read_weights(norms))
        return merged.split(sizes, dim=1)


def read_weights(norms: HeadNorms | None) -> Weights | None:
    """Norms as the kernels take them: of one epsilon."""
    return None if norms is None else (norms[0].weight, norms[1].weight, norms[0].eps)
