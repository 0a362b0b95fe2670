"""A decoder layer's steps in our own CPU kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polymux.core.compute.attention import AttentionBackend, PagedBatch
from polymux.core.compute.cpu.attention import NativeAttention
from polymux.core.compute.cpu.kernels import CpuKernels
from polymux.core.compute.fast.operations import HeadNorms, Operations, recognise_gate
from polymux.core.compute.fast.structure import Norm


class NativeOperations(Operations):
    """For float32. What it does not know it leaves to torch."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._kinds: dict[nn.Module, str | None] = {}

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        if x.dim() != 2 or not x.is_contiguous():
            return super().norm(x, norm)
        return self._kernels.add_norm(x, None, norm)

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return self._kernels.add_norm(x.contiguous(), residual, norm), residual

    def gate(self, act: nn.Module, gate_up: Tensor) -> Tensor:
        if act not in self._kinds:
            self._kinds[act] = recognise_gate(act, torch.device("cpu"))
        kind = self._kinds[act]
        return super().gate(act, gate_up) if kind is None else self._kernels.gate(gate_up.contiguous(), kind)

    def writes_for(self, backend: AttentionBackend) -> bool:
        return isinstance(backend, NativeAttention)

    def rotate_write(
        self,
        merged: Tensor,
        heads: int,
        norms: HeadNorms | None,
        turning: tuple[Tensor, Tensor],
        cache: Tensor,
        batch: PagedBatch,
    ) -> Tensor:
        return self._kernels.rotate_write(merged.contiguous(), heads, norms, *turning, cache, batch)
